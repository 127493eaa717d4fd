"""A batch's outputs, split into rows: what is as declared gets through, in the declared order; nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from b2gmodel.live.tensors import Result, Tensor, TensorSpec, split_batch


class TestSplit:
    DECLARED = (TensorSpec("a", "INT16", (2,)), TensorSpec("b", "FP32", (-1,)))
    A = Tensor("a", "INT16", (3, 2), memoryview(bytes(range(12))))
    B = Tensor("b", "FP32", (3, 1), memoryview(bytes(range(12))))

    def split(self, *outputs: Tensor) -> tuple[Result, ...]:
        return split_batch(outputs, self.DECLARED, rows=3, batched=True)

    def test_rows_in_the_declared_order(self) -> None:
        assert self.split(self.B, self.A) == self.split(self.A, self.B)
        assert [[bytes(tensor.data) for tensor in row] for row in self.split(self.B, self.A)] == [
            [bytes(range(4 * row, 4 * row + 4))] * 2 for row in range(3)
        ]

    @pytest.mark.parametrize(
        ("outputs", "words"),
        [
            ((A,), "output b is missing"),
            ((A, B, A), "'a' is there twice"),
            ((A, B, replace(A, name="c")), "'c' is unknown"),
            ((A, replace(B, datatype="INT32")), "output b is INT32, declared FP32"),
            ((replace(A, shape=(4, 2)), B), "output a has shape"),
            ((replace(A, shape=(3, 1)), B), "output a has shape"),
            ((replace(A, shape=(6,)), B), "output a has shape"),
            ((replace(A, shape=()), B), "output a has shape"),
            ((A, replace(B, shape=(3, -1))), "output b has shape"),
            ((A, replace(B, shape=(3, 2))), "output b has 12 bytes, not 3 rows of 8"),
            ((A, replace(B, data=memoryview(bytes(13)))), "output b has 13 bytes, not 3 rows of 4"),
        ],
    )
    def test_what_is_not_as_declared(self, outputs: tuple[Tensor, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            self.split(*outputs)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"\x01\0\0\0a\x02\0\0\0b", "longer than its tensor"),
            (b"\x01\0\0\0a\x02\0", "ends before its last element"),
            (b"\x01\0\0\0a\0\0\0\0c", "1 bytes after the last"),
        ],
    )
    def test_strings_that_do_not_add_up(self, data: bytes, words: str) -> None:
        text = Tensor("t", "BYTES", (2, 1), memoryview(data))
        with pytest.raises(ValueError, match=words):
            split_batch([text], [TensorSpec("t", "BYTES", (1,))], rows=2, batched=True)
