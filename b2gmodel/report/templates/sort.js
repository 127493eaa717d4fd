// A button in each header cell sorts its table; without this script every table reads as it was written.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], written = [...body.rows];
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      body.append(...written.slice().sort((a, b) => compare(a.cells[head.cellIndex], b.cells[head.cellIndex], way)));
    });
  }
}
// Numbers by size, text by its letters; numbers before text, and what is missing last, whichever way.
function compare(a, b, way) {
  const [rankA, rankB] = [rank(a), rank(b)];
  if (rankA !== rankB) return rankA - rankB;
  if (rankA === 0) return way * (Number(a.dataset.value) - Number(b.dataset.value));
  return way * a.textContent.localeCompare(b.textContent, "en", {numeric: true});
}
function rank(cell) {
  if (cell.dataset.value !== undefined) return 0;
  return cell.textContent.trim() === "\u2013" ? 2 : 1;
}
