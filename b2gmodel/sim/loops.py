"""The kernel's event loops, compiled. What they mean is said in ``kernel.py``, what they remember in ``state.py``.

Rules here: no allocation and no call that passes all of the state, as either costs more than an event.
"""

from __future__ import annotations

import numpy as np

from b2gmodel.sim.compiled import compiled
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.state import DELAY, QUEUE, SHARED, Ints, Plant, State


@compiled
def advance_any(  # noqa: PLR0915 (see the rule above)
    plant: Plant,
    state: State,
    rows: Floats,
    ready: Floats,
    drain: bool,
    out_number: Ints,
    out_ready: Floats,
    out_launched: Floats,
    out_delivered: Floats,
) -> int:
    """Runs until a flight is free and no row is left for it (with ``drain``, until nothing flies).

    Args:
        rows: the work of the next launches, shape ``[n, legs]``.
        ready: when each of their batches is full, shape ``[n]``; empty in a closed cycle.
        out_number, out_ready, out_launched, out_delivered: filled in order of delivery; room for n + f.

    Returns:
        How many were delivered.
    """
    visits, kind, limit, rates, shared = plant
    (
        due_s,
        due_flight,
        counts,
        idle,
        leg,
        number,
        ready_s,
        launched_s,
        at_s,
        work,
        free_s,
        goal,
        inside,
        inside_count,
        share,
        clock_s,
        done_s,
        waiting,
        head,
        queued,
        busy,
        residence_s,
    ) = state
    legs, flights, used, delivered = len(visits), len(leg), 0, 0
    due, idlers, launches = counts[0], counts[1], counts[2]
    # A single server at the end lets flights go in the order in which it took them: they need no event to be sorted.
    sorts_itself = kind[visits[legs - 1]] == QUEUE and limit[visits[legs - 1]] == 1
    first_idle = 0
    while True:
        # Who moves: a flight that boards (while any is idle and has a row), one that is done at a shared station,
        # or one that arrives somewhere.
        boards = first_idle < idlers and used < len(rows)
        if boards:
            flight = idle[first_idle]
            first_idle += 1
            if first_idle == idlers:
                first_idle = idlers = 0
            now_s = at_s[flight]
        elif first_idle < idlers and not drain:
            break
        else:
            station = -1
            for other in shared:
                if station < 0 or done_s[other] < done_s[station]:
                    station = other
            if station >= 0 and done_s[station] < np.inf and (due == 0 or done_s[station] <= due_s[0, due - 1]):
                now_s = done_s[station]
                share[station] = goal[station, inside_count[station] - 1]
                clock_s[station] = now_s
                inside_count[station] -= 1
                flight = inside[station, inside_count[station]]
                if queued[station] > 0:
                    heir = waiting[station, head[station]]
                    head[station] = (head[station] + 1) % flights
                    queued[station] -= 1
                    _insert(goal, inside, station, inside_count[station], share[station] + work[heir, leg[heir]], heir)
                    inside_count[station] += 1
                done_s[station] = _completion(goal, inside_count, share, clock_s, rates, station)
                residence_s[station] += now_s - at_s[flight]
                leg[flight] += 1
            elif due > 0:
                due -= 1
                now_s, flight = due_s[0, due], due_flight[0, due]
                if leg[flight] < legs:
                    station = visits[leg[flight]]
                    amount = work[flight, leg[flight]]
                    busy[station] += amount
                    if kind[station] == SHARED:
                        at_s[flight] = now_s
                        count = inside_count[station]
                        if count == limit[station]:
                            waiting[station, (head[station] + queued[station]) % flights] = flight
                            queued[station] += 1
                            continue
                        share[station] = _share_at(now_s, inside_count, share, clock_s, rates, station)
                        clock_s[station] = now_s
                        _insert(goal, inside, station, count, share[station] + amount, flight)
                        inside_count[station] = count + 1
                        done_s[station] = _completion(goal, inside_count, share, clock_s, rates, station)
                        continue
                    server = 0
                    for other in range(1, limit[station]):
                        if free_s[station, other] < free_s[station, server]:
                            server = other
                    end_s = max(now_s, free_s[station, server]) + amount
                    free_s[station, server] = end_s
                    residence_s[station] += end_s - now_s
                    leg[flight] += 1
                    now_s = end_s
                    if leg[flight] == legs and not sorts_itself:
                        _insert(due_s, due_flight, 0, due, now_s, flight)
                        due += 1
                        continue
            else:
                break
            if leg[flight] == legs:
                out_number[delivered] = number[flight]
                out_ready[delivered] = ready_s[flight]
                out_launched[delivered] = launched_s[flight]
                out_delivered[delivered] = now_s
                delivered += 1
                boards = used < len(rows)
                if not boards:
                    at_s[flight] = now_s
                    idle[idlers] = flight
                    idlers += 1
                    continue
        if boards:
            ready_s[flight] = ready[used] if len(ready) > 0 else now_s
            now_s = max(now_s, ready_s[flight])
            launched_s[flight] = now_s
            number[flight] = launches
            launches += 1
            leg[flight] = 0
            for column in range(legs):
                work[flight, column] = rows[used, column]
            used += 1
        # Nobody meets anybody in a delay: it is over as soon as it begins.
        while leg[flight] < legs and kind[visits[leg[flight]]] == DELAY:
            station = visits[leg[flight]]
            amount = work[flight, leg[flight]]
            busy[station] += amount
            residence_s[station] += amount
            now_s += amount
            leg[flight] += 1
        _insert(due_s, due_flight, 0, due, now_s, flight)
        due += 1
    # Who is still idle moves to the front.
    for place in range(first_idle, idlers):
        idle[place - first_idle] = idle[place]
    counts[0], counts[1], counts[2] = due, idlers - first_idle, launches
    return delivered


@compiled
def advance_lone(  # noqa: PLR0915 (see the rule above)
    plant: Plant,
    state: State,
    rows: Floats,
    ready: Floats,
    drain: bool,
    out_number: Ints,
    out_ready: Floats,
    out_launched: Floats,
    out_delivered: Floats,
) -> int:
    """As ``advance_any`` in a closed cycle without a drain, for delays before one single server: half its work.

    One event a cycle: the first to arrive at the server is served, delivered, launched again, and put in order.
    """
    visits, leg, number, launched_s, ready_s, work = (
        plant.visits, state.leg, state.number, state.launched_s, state.ready_s, state.work,
    )  # fmt: skip
    due_s, due_flight, counts, idle = state.due_s, state.due_flight, state.counts, state.idle
    last = len(visits) - 1
    server = visits[last]
    free_s, busy_s, residence_s = state.free_s[server, 0], 0.0, 0.0
    due, used, delivered = counts[0], 0, 0
    # The row stands at the end of its room and grows in front: a new key is mostly among the greatest.
    room = due_s.shape[1]
    front = _move(due_s, due_flight, 0, due, room)
    while True:
        if counts[1] > 0 and used < len(rows):
            flight = idle[0]
            counts[1] -= 1
            for place in range(counts[1]):
                idle[place] = idle[place + 1]
            now_s = state.at_s[flight]
        elif counts[1] > 0:
            break
        else:
            due -= 1
            arrived_s, flight = due_s[0, front + due], due_flight[0, front + due]
            now_s = max(arrived_s, free_s) + work[flight, last]
            free_s = now_s
            busy_s += work[flight, last]
            residence_s += now_s - arrived_s
            out_number[delivered] = number[flight]
            out_ready[delivered] = out_launched[delivered] = launched_s[flight]
            out_delivered[delivered] = now_s
            delivered += 1
            if used == len(rows):
                leg[flight] = last + 1
                state.at_s[flight] = now_s
                idle[0] = flight
                counts[1] = 1
                break
        ready_s[flight] = launched_s[flight] = now_s
        number[flight] = counts[2] + used
        leg[flight] = last
        for column in range(last):
            amount = rows[used, column]
            state.busy[visits[column]] += amount
            state.residence_s[visits[column]] += amount
            now_s += amount
        work[flight, last] = rows[used, last]
        used += 1
        if front == 0:
            front = _move(due_s, due_flight, 0, due, room)
        place = front
        while place < front + due and due_s[0, place] > now_s:
            due_s[0, place - 1], due_flight[0, place - 1] = due_s[0, place], due_flight[0, place]
            place += 1
        due_s[0, place - 1], due_flight[0, place - 1] = now_s, flight
        front -= 1
        due += 1
    _move(due_s, due_flight, front, due, due)
    counts[0] = due
    counts[2] += used
    state.free_s[server, 0] = free_s
    state.busy[server] += busy_s
    state.residence_s[server] += residence_s
    return delivered


@compiled
def advance_pair(  # noqa: PLR0915 (see the rule above)
    plant: Plant,
    state: State,
    rows: Floats,
    ready: Floats,
    drain: bool,
    out_number: Ints,
    out_ready: Floats,
    out_launched: Floats,
    out_delivered: Floats,
) -> int:
    """As ``advance_lone``, for one shared station where nobody waits before one single server: a third of the work.

    Two events a cycle: the first on its way arrives at the shared station, or the first there is done, is served,
    delivered and launched again. The server lets flights go in order, so that those on their way need no sorting.
    """
    shared, server = plant.visits[0], plant.visits[1]
    rates, leg, number, launched_s, ready_s, at_s, work = (
        plant.rates[shared], state.leg, state.number, state.launched_s, state.ready_s, state.at_s, state.work,
    )  # fmt: skip
    goal, inside, due_s, due_flight, counts, idle = (
        state.goal, state.inside, state.due_s, state.due_flight, state.counts, state.idle,
    )  # fmt: skip
    flights, used, delivered, due = len(leg), 0, 0, counts[0]
    count, share, clock_s = state.inside_count[shared], state.share[shared], state.clock_s[shared]
    done_s, free_s = state.done_s[shared], state.free_s[server, 0]
    shared_busy, shared_residence_s, server_busy, server_residence_s = 0.0, 0.0, 0.0, 0.0
    # Who is on the way, in a ring: the first at the head; each arrives when it was launched.
    ring, head = state.waiting[server], 0
    for place in range(due):
        ring[place] = due_flight[0, due - 1 - place]
    boarding = min(counts[1], len(rows))
    for place in range(boarding):
        flight = idle[place]
        launched_s[flight] = ready_s[flight] = at_s[flight]
        number[flight] = counts[2] + used
        leg[flight] = 0
        work[flight, 0], work[flight, 1] = rows[used, 0], rows[used, 1]
        used += 1
        ring[due] = flight
        due += 1
    for place in range(boarding, counts[1]):
        idle[place - boarding] = idle[place]
    counts[1] -= boarding
    next_s = launched_s[ring[0]] if due > 0 else np.inf
    while counts[1] == 0:
        if next_s < done_s:
            flight = ring[head]
            head = head + 1 if head + 1 < flights else 0
            due -= 1
            if count > 0:
                share += (next_s - clock_s) * rates[count - 1] / count
            else:
                share = 0.0
            clock_s = at_s[flight] = next_s
            amount = work[flight, 0]
            shared_busy += amount
            _insert(goal, inside, shared, count, share + amount, flight)
            count += 1
            next_s = launched_s[ring[head]] if due > 0 else np.inf
        else:
            count -= 1
            share, flight, clock_s = goal[shared, count], inside[shared, count], done_s
            shared_residence_s += clock_s - launched_s[flight]
            amount = work[flight, 1]
            server_busy += amount
            free_s = max(clock_s, free_s) + amount
            server_residence_s += free_s - clock_s
            out_number[delivered] = number[flight]
            out_ready[delivered] = out_launched[delivered] = launched_s[flight]
            out_delivered[delivered] = free_s
            delivered += 1
            if used < len(rows):
                launched_s[flight] = ready_s[flight] = free_s
                number[flight] = counts[2] + used
                work[flight, 0], work[flight, 1] = rows[used, 0], rows[used, 1]
                used += 1
                behind = head + due
                ring[behind if behind < flights else behind - flights] = flight
                if due == 0:
                    next_s = free_s
                due += 1
            else:
                leg[flight] = 2
                at_s[flight] = free_s
                idle[0] = flight
                counts[1] = 1
        done_s = clock_s + max(0.0, goal[shared, count - 1] - share) * count / rates[count - 1] if count > 0 else np.inf
    for place in range(due):
        flight = ring[(head + place) % flights]
        due_s[0, due - 1 - place], due_flight[0, due - 1 - place] = launched_s[flight], flight
    counts[0] = due
    counts[2] += used
    state.inside_count[shared], state.share[shared], state.clock_s[shared] = count, share, clock_s
    state.done_s[shared], state.free_s[server, 0] = done_s, free_s
    state.busy[shared] += shared_busy
    state.busy[server] += server_busy
    state.residence_s[shared] += shared_residence_s
    state.residence_s[server] += server_residence_s
    return delivered


@compiled
def _share_at(now_s: float, inside_count: Ints, share: Floats, clock_s: Floats, rates: Floats, station: int) -> float:
    """What each flight in service at a shared station has got by now; counted anew when the station was empty."""
    count = inside_count[station]
    if count == 0:
        return 0.0
    return float(share[station] + (now_s - clock_s[station]) * rates[station, count - 1] / count)


@compiled
def _insert(keys: Floats, flights: Ints, row: int, count: int, key: float, flight: int) -> None:
    """Into a row sorted with the greatest first; of equal keys the one that came earlier is served earlier."""
    place = count
    while place > 0 and keys[row, place - 1] <= key:
        keys[row, place] = keys[row, place - 1]
        flights[row, place] = flights[row, place - 1]
        place -= 1
    keys[row, place] = key
    flights[row, place] = flight


@compiled
def _move(keys: Floats, flights: Ints, front: int, count: int, end: int) -> int:
    """Moves ``count`` places of the only row so that they end before ``end``; where they begin now."""
    shift = end - count - front
    for step in range(count):
        place = front + (count - 1 - step if shift > 0 else step)
        keys[0, place + shift], flights[0, place + shift] = keys[0, place], flights[0, place]
    return end - count


@compiled
def _completion(goal: Floats, inside_count: Ints, share: Floats, clock_s: Floats, rates: Floats, station: int) -> float:
    """When the first flight in service at a shared station is done, if nobody else comes."""
    count = inside_count[station]
    if count == 0:
        return np.inf
    left = max(0.0, goal[station, count - 1] - share[station])
    return float(clock_s[station] + left * count / rates[station, count - 1])
