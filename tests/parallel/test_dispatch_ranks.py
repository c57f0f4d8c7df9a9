"""Dispatch between ranks against one process with all tokens (FAULTS A02, B12, B14): four gloo ranks run every case.

Expert e is tanh(rows A_e) · weight. The right rows are the local dispatcher's on the concatenated tokens, whose own
values test_dispatch.py states by hand; the right outputs and gradients are autograd's of a sum over (token, choice), in
float64.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import spawn

from dstrain.config.errors import InputError
from dstrain.parallel.dispatch import Done, LocalDispatcher
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.dispatch_nodes import NodeLimitedDispatcher
from dstrain.parallel.dispatch_traffic import routing_traffic
from dstrain.parallel.payload import PAYLOADS, FP8Payload
from dstrain.precision.fp8_tiles import dequantize_rows, quantize_rows

EXPERTS, HIDDEN, CHOICES = 8, 6, 3
CPU = torch.device("cpu")


def draw(tokens: list[int], case: str, seed: int = 0, dtype=torch.float64, hidden: int = HIDDEN):
    """x, ids and weights of all ranks' tokens and the gradient of their output, the ranks' tokens one after another."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(tokens)
    x, grad = (torch.randn(total, hidden, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weights = torch.rand(total, CHOICES, generator=generator, dtype=torch.float64).add(0.1)
    weights = weights if dtype == torch.float64 else weights.float()
    ids = torch.rand(total, EXPERTS, generator=generator).argsort(1)[:, :CHOICES]
    if case == "first":  # the first two experts and the fourth: on rank 0 and 1 of 4, on rank 0 of 2, on node 0 of 2
        ids = torch.tensor([1, 0, 3]).expand(total, -1).contiguous()
    if case == "one":  # expert 5 alone, three times
        ids = torch.full((total, CHOICES), 5)
    if case == "pair":  # two picks on one rank
        ids = torch.tensor([7, 2, 6]).expand(total, -1).contiguous()
    if case == "none":
        ids[torch.rand(total, CHOICES, generator=generator) < 0.4] = -1
        ids[: total // 4] = -1
    return x, ids, weights, grad


CASES = [
    ([3, 5, 4, 6], "random"),
    ([7, 0, 1, 2], "random"),
    ([0, 6, 0, 0], "random"),
    ([0, 0, 0, 0], "random"),
    ([2, 3, 0, 4], "first"),
    ([4, 1, 2, 2], "one"),
    ([2, 2, 3, 1], "pair"),
    ([5, 4, 3, 6], "none"),
]


def matrices(hidden: int = HIDDEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, hidden, hidden, generator=generator, dtype=torch.float64)


def equations(x, ids, weights, grad):
    """Output, and gradients of x, weights and matrices, from a sum over tokens and choices."""
    x, weights, a = x.clone().requires_grad_(), weights.clone().requires_grad_(), matrices().requires_grad_()
    chosen = (ids >= 0).to(x.dtype) * weights
    each = torch.tanh(torch.einsum("th,tkhi->tki", x, a[ids.clamp_min(0)]))
    output = torch.einsum("tki,tk->ti", each, chosen)
    return output.detach(), *torch.autograd.grad(output, (x, weights, a), grad)


def through(dispatcher, x, ids, weights, grad, experts: range):
    """One pass forward and back with this rank's experts. -> rows, row_weights, offsets, output, three gradients."""
    route = dispatcher.route(ids, EXPERTS)
    rows, row_weights = route.dispatch(x, weights).wait()
    mine = matrices()[experts.start : experts.stop]
    inputs = tuple(tensor.clone().requires_grad_() for tensor in (rows, row_weights, mine))
    ends = route.offsets.tolist()
    parts = [torch.tanh(inputs[0][a:b] @ inputs[2][e]) for e, (a, b) in enumerate(zip([0, *ends], ends))]
    outputs = torch.cat(parts) * inputs[1].unsqueeze(1)
    output = route.combine(outputs.detach()).wait()
    grad_rows = route.combine_backward(grad).wait()
    grad_inputs = torch.autograd.grad(outputs, inputs, grad_rows)
    grad_x, grad_weights = route.dispatch_backward(*grad_inputs[:2]).wait()
    return rows, row_weights, route.offsets, output, grad_x, grad_weights, grad_inputs[2]


def my_part(tokens: list[int], index: int) -> slice:
    return slice(sum(tokens[:index]), sum(tokens[: index + 1]))


def check_case(dispatcher, index: int, ep: int, tokens: list[int], case: str, alignment: int, exact: bool) -> None:
    everything = draw(tokens, case)
    mine = my_part(tokens, index)
    experts = range(index * EXPERTS // ep, (index + 1) * EXPERTS // ep)
    got = through(dispatcher, *(tensor[mine] for tensor in everything), experts)
    local = through(LocalDispatcher(alignment), *everything, range(EXPERTS))

    first = int(local[2][experts.start - 1]) if experts.start else 0
    if case == "none" and experts.stop == EXPERTS:  # the local one keeps its rows of -1 here
        real = (local[1][first:] > 0).nonzero().squeeze(1)
        mine_real = (got[1] > 0).nonzero().squeeze(1)
        assert torch.equal(got[0][mine_real], local[0][first:][real])
        assert torch.equal(got[1][mine_real], local[1][first:][real])
        assert all(end % alignment == 0 for end in got[2].tolist())
    else:
        assert torch.equal(got[2], local[2][experts.start : experts.stop] - first), (got[2], local[2])
        rows = slice(first, first + len(got[0]))
        assert torch.equal(got[1], local[1][rows])
        real = got[1] > 0
        assert torch.equal(got[0][real], local[0][rows][real]) and not got[0][~real].any()

    right = equations(*everything)
    for name, a, b in (("output", got[3], right[0]), ("x", got[4], right[1]), ("weights", got[5], right[2])):
        where = f"{case} {tokens} {name}"
        torch.testing.assert_close(a, b[mine], rtol=1e-13, atol=1e-13, msg=lambda text: f"{where}: {text}")
    torch.testing.assert_close(got[6], right[3][experts.start : experts.stop], rtol=1e-13, atol=1e-13)
    if exact and case != "none":  # one hop adds what one process adds, in its order
        for place in (3, 4, 5):
            assert torch.equal(got[place], local[place][mine]), (case, tokens, place)


class Recording(FP8Payload):
    """Keeps the columns that were decoded last: what an expert's rank has received."""

    def decode(self, columns, dtype):
        self.columns = columns
        return super().decode(columns, dtype)


def check_fp8(make, index: int, tokens: list[int]) -> None:
    """Received codes and exponents equal those of the same rows quantised here; a quantiser finds them again."""
    payload, hidden = Recording(), 200  # a whole tile and a ragged one
    x, ids, weights, grad = draw(tokens, "random", dtype=torch.bfloat16, hidden=hidden)
    x[0, :128] = 0
    x[1, :128] *= 1e-30
    x[:, 5] = 228.0  # is rounded to 224 where it is the largest: the second quantiser halves the scale
    mine = my_part(tokens, index)
    route, local = make(payload).route(ids[mine], EXPERTS), LocalDispatcher().route(ids, EXPERTS)
    rows, row_weights = route.dispatch(x[mine], weights[mine]).wait()
    sent_codes, sent_exponents = payload.columns
    exact_rows, exact_weights = local.dispatch(x, weights).wait()
    first = int(local.offsets[index * 2 - 1]) if index else 0
    here = slice(first, first + len(rows))
    codes, scale = quantize_rows(exact_rows[here])
    assert torch.equal(row_weights, exact_weights[here]) and row_weights.dtype == torch.float32
    assert torch.equal(sent_codes, codes.view(torch.uint8))
    assert torch.equal(sent_exponents.view(torch.float8_e8m0fnu).float(), scale)
    assert torch.equal(rows, dequantize_rows(codes, scale, torch.bfloat16))
    assert torch.equal(dequantize_rows(*quantize_rows(rows), torch.bfloat16), rows)

    grad_rows = route.combine_backward(grad[mine]).wait()
    right = local.combine_backward(grad).wait()[here]
    assert torch.equal(grad_rows, dequantize_rows(*quantize_rows(right), torch.bfloat16))
    assert grad_rows.dtype == torch.bfloat16 and not torch.equal(grad_rows, right)

    # The way back from the experts is not quantised.
    back, back_weights = torch.randn(2, ids.numel(), hidden, generator=torch.Generator().manual_seed(5)).bfloat16()
    back_weights = back_weights[:, 0].float() / 3
    right = sum_by_node(back, ids, local, isinstance(route.dispatcher, NodeLimitedDispatcher))
    assert torch.equal(route.combine(back[here]).wait(), right[mine])
    grad_x, grad_weights = route.dispatch_backward(back[here], back_weights[here]).wait()
    assert torch.equal(grad_x, right[mine])
    assert torch.equal(grad_weights, back_weights[local.row_of_slot][mine]) and grad_weights.dtype == torch.float32


def sum_by_node(rows, ids, local, node_limited: bool) -> torch.Tensor:
    """The documented rounding: FP32 sums, rounded to BF16 per node (of 4 experts) and then per token."""
    slots = rows[local.row_of_slot].float()  # [T, k, hidden]
    if not node_limited:
        return slots.sum(1).bfloat16()
    parts = [(slots * (ids // 4 == node).unsqueeze(-1)).sum(1).bfloat16().float() for node in range(2)]
    return (parts[0] + parts[1]).bfloat16()


def check_traffic(make, index: int, node_limited: bool) -> None:
    """The counters of what was sent equal the numbers from the routing tables, phase by phase."""
    tokens, hidden = [5, 0, 9, 4], 200
    x, ids, weights, grad = draw(tokens, "none", dtype=torch.bfloat16, hidden=hidden)
    mine = my_part(tokens, index)
    for payload in PAYLOADS.values():
        dispatcher = make(payload)
        for _ in range(2):
            dispatcher.traffic.reset()
            route = dispatcher.route(ids[mine], EXPERTS)
            rows, row_weights = route.dispatch(x[mine], weights[mine]).wait()
            route.combine(rows).wait()
            route.combine_backward(grad[mine]).wait()
            route.dispatch_backward(rows, row_weights).wait()
        tables = [ids[my_part(tokens, rank)] for rank in range(4)]
        right = routing_traffic(tables, EXPERTS, 2, node_limited, hidden, torch.bfloat16, payload)[index]
        assert dispatcher.traffic.metrics() == right.metrics()
        assert right.metrics()["slow_bytes"] > 0


def check_identity(dispatcher, index: int, tokens: list[int]) -> None:
    x, ids, weights, _ = draw(tokens, "none")
    mine = my_part(tokens, index)
    route = dispatcher.route(ids[mine], EXPERTS)
    rows, row_weights = route.dispatch(x[mine], weights[mine]).wait()
    got = route.combine(rows * row_weights.unsqueeze(-1)).wait()
    torch.testing.assert_close(got, (x * (weights * (ids >= 0)).sum(1, keepdim=True))[mine], rtol=1e-13, atol=1e-13)


def check_several_at_once(dispatcher, index: int, tokens: list[int]) -> None:
    """Started in one order and waited for in the same, two micro-batches do not mix."""
    mine = my_part(tokens, index)
    batches = [draw(tokens, "random", seed) for seed in (1, 2)]
    routes = [dispatcher.route(ids[mine], EXPERTS) for _, ids, _, _ in batches]
    pending = [route.dispatch(x[mine], weights[mine]) for route, (x, _, weights, _) in zip(routes, batches)]
    rows = [each.wait() for each in pending]
    pending = [route.combine(a * b.unsqueeze(-1)) for route, (a, b) in zip(routes, rows)]
    for each, (x, _, weights, _) in zip(pending, batches):
        torch.testing.assert_close(each.wait(), (x * weights.sum(1, keepdim=True))[mine], rtol=1e-13, atol=1e-13)


def check_starts_do_not_wait(dispatcher, index: int, tokens: list[int]) -> None:
    """Node 0 starts each communication while node 1 has not: only a wait may stand still for the slow link."""
    mine = my_part(tokens, index)
    x, ids, weights, grad = (tensor[mine] for tensor in draw(tokens, "random"))
    flag, marks = torch.zeros(1), iter(range(1000))

    def started_first_on_node_0(start):
        mark = next(marks)
        if index >= 2:
            dist.recv(flag, src=index - 2, tag=mark)
        pending = start()
        if index < 2:
            dist.send(flag, dst=index + 2, tag=mark)
        return pending

    route = started_first_on_node_0(lambda: dispatcher.route(ids, EXPERTS))
    route.sizes = Done(route.sizes.wait())  # dispatch itself needs the sizes of messages, so it waits for these
    rows, row_weights = started_first_on_node_0(lambda: route.dispatch(x, weights)).wait()
    started_first_on_node_0(lambda: route.combine(rows)).wait()
    started_first_on_node_0(lambda: route.combine_backward(grad)).wait()
    started_first_on_node_0(lambda: route.dispatch_backward(rows, row_weights)).wait()


def everything(rank: int, size: int) -> int:
    whole = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    limit = timedelta(seconds=60)

    def flat(group, payload=PAYLOADS["compute"], alignment=1):
        return AllToAllDispatcher(group, 2, payload, CPU, alignment)

    def nodes(payload=PAYLOADS["compute"], alignment=1, ranks_per_node=2):
        return NodeLimitedDispatcher(whole, ranks_per_node, payload, CPU, limit, alignment)

    checked = 0
    for alignment in (1, 4):
        for group, ep, index in ((alone[rank], 1, 0), (pairs[rank // 2], 2, rank % 2), (whole, 4, rank)):
            dispatcher = flat(group, alignment=alignment)
            for tokens, case in CASES:
                # Two groups of 2 have different tokens and do not wait for each other.
                tokens = tokens[rank // 2 * 2 :][:2] if ep == 2 else tokens[rank:][:1] if ep == 1 else tokens
                check_case(dispatcher, index, ep, tokens, case, alignment, exact=True)
                checked += 1
        dispatcher = nodes(alignment=alignment)
        for tokens, case in CASES:
            check_case(dispatcher, rank, 4, tokens, case, alignment, exact=False)
            checked += 1
    for ranks_per_node in (1, 4):  # every rank a node, and all in one
        check_case(nodes(ranks_per_node=ranks_per_node), rank, 4, *CASES[-1], 1, exact=False)
    for dispatcher in (flat(whole), nodes()):
        check_identity(dispatcher, rank, [3, 0, 8, 5])
        check_several_at_once(dispatcher, rank, [3, 5, 0, 6])
        check_starts_do_not_wait(dispatcher, rank, [3, 5, 2, 6])
    check_fp8(lambda payload: flat(whole, payload), rank, [4, 6, 0, 5])
    check_fp8(nodes, rank, [4, 6, 0, 5])
    check_traffic(lambda payload: flat(whole, payload), rank, node_limited=False)
    check_traffic(nodes, rank, node_limited=True)
    with pytest.raises(InputError, match=r"parallel.ep=4: 6 experts do not divide evenly"):
        flat(whole).route(torch.zeros(1, 1, dtype=torch.int64), 6)
    with pytest.raises(InputError, match=r"parallel.ranks_per_node=3: .* parallel.ep=4 .* valid are divisors of 4"):
        NodeLimitedDispatcher(whole, 3, PAYLOADS["compute"], CPU, limit)
    return checked


def test_any_number_of_ranks_equals_one_process_with_all_tokens():
    assert spawn(everything, 4, timeout=100) == [64] * 4
