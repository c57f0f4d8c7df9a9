"""What a pipeline rank keeps, and for how long. DualPipeV on one rank needs no other: it runs in this process."""

import gc
import weakref

import pytest
from pipelines import CONFIG, Rank, loss_weights, make_batches
from ranks import spawn

from dstrain.model.block import BlockPass
from dstrain.parallel import executor as executing
from dstrain.parallel.schedules.actions import Action, Work
from dstrain.parallel.transfer import Transfer


@pytest.fixture
def without_cycle_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("overlap", [True, False])
def test_activations_go_with_their_backward(monkeypatch, without_cycle_collector, overlap):
    """Counted are blocks' passes that anything still refers to: after an action just those of the chunks under way."""
    one = Rank("dualpipev", 1, 4, CONFIG, "fp32", 0, 1, overlap=overlap)
    batches = make_batches(CONFIG, 4)
    passes, seen = weakref.WeakSet(), []
    init, do = BlockPass.__init__, executing._Run.do

    def counted_init(self, *arguments, **options):
        passes.add(self)
        init(self, *arguments, **options)

    def counted_do(run, action):
        do(run, action)
        blocks = sum(chunk.blocks for chunk in run.chunks.values())
        seen.append(len(run.chunks))
        assert len(passes) == blocks

    monkeypatch.setattr(BlockPass, "__init__", counted_init)
    monkeypatch.setattr(executing._Run, "do", counted_do)
    one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=1)
    assert len(passes) == 0 and max(seen) >= 2
    one.executor.evaluate(batches, one.sums, step=1)
    assert len(passes) == 0


def longest_kept(rank, world):
    """-> the most tensors kept for sending in one step of many micro-batches, by schedule."""
    most = {}
    send = Transfer.send
    for name in ("1f1b", "dualpipe"):
        one = Rank(name, 2, 12, CONFIG, "fp32", rank, world)
        batches = make_batches(CONFIG, 12, length=4)

        def counted(self, message, tensor, name=name):
            send(self, message, tensor)
            most[name] = max(most.get(name, 0), len(self.sent))

        Transfer.send = counted
        one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=1)
    Transfer.send = send

    place, do = iter(range(1, 1000)), executing._Run.do

    def checked(run, action):
        after = next(place)
        coming = run.needs[after] if after < len(run.needs) else []
        assert all(message in run.transfer.posted for message in coming)
        do(run, action)

    executing._Run.do = checked  # of the DualPipe above
    one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=1)
    return most


def test_what_was_sent_is_not_kept_until_the_end_of_the_step():
    """12 micro-batches: on 2 ranks 12 messages each way. Kept are those whose arrival no answer has proved yet.

    And before each action the receives of the next are posted.
    """
    for most in spawn(longest_kept, 2, timeout=60):
        assert most["1f1b"] <= 3 and most["dualpipe"] <= 6


def test_weight_gradients_out_of_order_or_left_over_are_found():
    one = Rank("dualpipev", 1, 2, CONFIG, "fp32", 0, 1)
    batches = make_batches(CONFIG, 2)
    actions = one.schedule.actions[0]
    places = [i for i, action in enumerate(actions) if action.kind == "W"]
    whole = list(actions)
    actions[places[0]] = Action("W", backward=Work(0, 7))
    with pytest.raises(AssertionError, match="wants the weight gradients of micro-batch 7 on stage 0") as error:
        one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=3)
    assert error.value.__notes__ == [
        f"in pipeline rank 0, step 3, action {places[0] + 1} of {len(actions)} (W of micro-batch 7 on stage 0)"
    ]
    actions[:] = [action for i, action in enumerate(whole) if i != places[-1]]
    with pytest.raises(AssertionError, match="the list is over, but 1 weight gradients are left"):
        one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=3)
