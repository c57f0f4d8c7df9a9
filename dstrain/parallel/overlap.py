"""A forward and a backward chunk run between each other, so that each one's communication goes on beside the other's
computation (arXiv 2412.19437 §3.2.1; REFERENCE §4).

The order is data, `schedules/pair.py`'s. In it the place of a communication is its place in the queue of the
communication stream, where it starts as soon as its input is ready, whatever computation stands before it: combine(F)
stands last and runs beside attention(B) and attention(W). Whoever ran that list to the letter would start it only when
the next layer's attention(F) already waits for it. So here a communication is started right behind what makes its
input; the order of the computations and that of the communications stay as they are.

dispatch(F) has a second input: the counts that attention(F)'s routing sends to the other ranks. Where these are not
there yet, it is started behind experts(B), so that nobody stands still for them.
"""

from dstrain.model.units import BackwardWay, ForwardWay
from dstrain.parallel.schedules.pair import Operation, Phase, pair_order, taken_by


DISPATCH_F, EXPERTS_B = Phase("dispatch", "F"), Phase("experts", "B")


def run_pair(forward: ForwardWay, backward: BackwardWay) -> None:
    """All blocks of both chunks; the longer one's rest runs alone. Both are left to their `finish`."""
    phases = {
        Phase("attention", "F"): forward.attention, Phase("attention", "B"): backward.attention,
        Phase("dispatch", "F"): forward.dispatch, Phase("dispatch", "B"): backward.dispatch,
        Phase("experts", "F"): forward.experts, Phase("experts", "B"): backward.experts,
        Phase("combine", "F"): forward.combine, Phase("combine", "B"): backward.combine,
        Phase("attention", "W"): backward.weights, Phase("experts", "W"): backward.weights,
    }
    late = False  # whether dispatch(F) is still to be started; no rank starts another communication before it
    for operation in issue_order(pair_order(forward.blocks, backward.blocks)):
        phase = operation.phase
        if phase == DISPATCH_F:
            late = not forward.dispatch_is_ready()
            if late:
                continue
        elif late and phase != EXPERTS_B:
            forward.dispatch()
            late = False
        phases[phase]()


def issue_order(operations: list[Operation]) -> list[Operation]:
    """The same, each communication right behind the operation whose result it takes; without one, in front."""
    waiting = {taken_by(operation): operation for operation in operations if operation.phase.communicates}
    issued = [waiting[None]] if None in waiting else []
    for operation in operations:
        if not operation.phase.communicates:
            issued.append(operation)
            if operation in waiting:
                issued.append(waiting[operation])
    return issued
