"""The training loop: steps, metrics, evaluations, checkpoints, and a clean end whatever ends it."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from dstrain.checkpoint.store import CheckpointStore
from dstrain.config.schema import TrainConfig
from dstrain.data.samples import EvalWindows
from dstrain.model.count import flops_per_token
from dstrain.model.model import Model
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.layout import Layout
from dstrain.parallel.place import here
from dstrain.parallel.watch import LEAVE
from dstrain.telemetry.console import RunConsole
from dstrain.telemetry.jsonl import JsonLines, NoLines
from dstrain.telemetry.wandb_run import NoWandb, WandbRun
from dstrain.train.evaluation import evaluate_heldout
from dstrain.train.job import RunFailure
from dstrain.train.optimizer import AdamW
from dstrain.train.run_folder import FollowedFolder, RunFolder
from dstrain.train.signals import StopSignals
from dstrain.train.state import RunState, restore, run_tensors
from dstrain.train.step import Stepper

class Trainer:
    """Owns the loop of one run; everything it works with is built by `main`."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder | FollowedFolder,
        console: RunConsole,
        model: Model,
        optimizer: AdamW,
        stepper: Stepper,
        state: RunState,
        layout: Layout,
        store: CheckpointStore,
        windows: EvalWindows | None,
        token_bytes: np.ndarray,
        files: dict[str, bytes],  # go into every checkpoint
        data_fingerprint: str,
        peak_tflops: float,  # of all ranks
        signals: StopSignals,  # whose handlers are there from `run` on until the process has said why it failed
        on_failure: Callable[[BaseException], str | None] = lambda error: None,  # called at once; -> a better reason
        wandb: WandbRun | NoWandb = NoWandb(),
    ):
        self.config, self.folder, self.console = config, folder, console
        self.model, self.optimizer, self.stepper, self.state, self.store = model, optimizer, stepper, state, store
        self.windows, self.token_bytes, self.files, self.data_fingerprint = windows, token_bytes, files, data_fingerprint
        self.signals, self.on_failure, self.wandb = signals, on_failure, wandb
        self.rolled_back: Counter[Path] = Counter()
        self.layout, self.ranks = layout, layout.mesh.host_group
        self.leads = layout.mesh.rank == 0  # the first rank writes the run's files and speaks to people
        self.saved_step = state.step if state.step else None
        self.peak_flops = peak_tflops * 1e12
        self.flops_per_token = flops_per_token(config.model, config.data.sequence_length)

    def run(self) -> dict | None:
        """Train until the run is finished or a signal comes; writes status.json. -> the last whole evaluation."""
        state, folder, whole = self.state, self.folder, None
        metrics_file, self.eval_file = (
            JsonLines(folder.path / name, state.step, self.console.say) if self.leads else NoLines()
            for name in ("metrics.jsonl", "eval.jsonl")
        )
        try:
            self.console.begin(*self.progress())
            while not self.finished() and not self.stopping():
                metrics = self.stepper.step(state)
                metrics["mfu"] = metrics["tokens_per_second"] * self.flops_per_token / self.peak_flops
                metrics |= self.stepper.stream.metrics(state.samples)
                metrics_file.write(metrics)
                self.wandb.step(metrics)
                self.console.step(metrics, *self.progress())
                if state.skipped_in_a_row >= self.config.optim.max_skipped_steps:
                    what = "a non-finite loss or gradient" + (" or a spike" if "spike" in metrics else "")
                    raise RunFailure(
                        f"{state.skipped_in_a_row} steps in a row had {what}, the last is step "
                        f"{state.step} (optim.max_skipped_steps={self.config.optim.max_skipped_steps}); "
                        f"weights are those after update {state.updates}"
                    )
                if metrics.get("spike") and self.config.guard.spikes == "rollback":
                    self.roll_back()
                self.periodic()
            self.console.end()
            self.save()
            if not self.stopping() and self.windows is not None and self.config.eval.at_end:
                whole = self.whole_evaluation_of_this_step() or self.evaluate(None)
            stopped = self.stopping()
            failure = self.store.wait()
            if failure:
                raise RunFailure(failure)
            if stopped:
                self.console.say(f"{stopped}: stopped after step {state.step}, saved; the same command continues")
            status = "interrupted" if stopped else "finished"
            folder.write_status(status, step=state.step, tokens=state.tokens, signal=stopped)
            return whole
        except BaseException as error:
            known = self.on_failure(error)
            self.console.end()
            if isinstance(error, CommunicationError):
                self.leave_save()
            else:
                self.store.join()  # not `wait`: other ranks may be gone
            reason = str(error) if isinstance(error, RunFailure) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # on a full disk there is no status, but the reason must come through
                folder.write_status("failed", step=state.step, tokens=state.tokens, reason=known or reason)
            if isinstance(error, CommunicationError):
                raise CommunicationError(f"after step {state.step}: {error}") from error
            raise
        finally:
            metrics_file.close()
            self.eval_file.close()

    def stopping(self) -> str | None:
        """The name of the signal that ends the run, on all ranks after the same step."""
        return self.signals.agree(self.ranks)

    def finished(self) -> bool:
        done, total = self.progress()
        return done >= total

    def progress(self) -> tuple[float, float]:
        """Done and total: in steps when run.steps ends the run, else in the schedule's tokens."""
        if self.config.run.steps is not None:
            return self.state.step, self.config.run.steps
        return self.state.tokens, self.config.schedule.tokens

    def periodic(self) -> None:
        step = self.state.step
        if self.windows is not None and self.config.eval.every and step % self.config.eval.every == 0:
            self.evaluate(self.config.eval.sequences)
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0:
            self.save()

    def evaluate(self, sequences: int | None) -> dict | None:
        """Evaluate and write the record; a signal ends a long evaluation without one."""
        begin = time.perf_counter()
        here.at(0, f"evaluation after step {self.state.step}")
        size = "the whole held-out text" if sequences is None else f"{sequences} held-out sequences"
        with self.console.task(f"evaluation of {size}") as show:
            result = evaluate_heldout(
                self.config, self.stepper.executor_of(self.state), self.layout.mesh, self.windows, self.token_bytes,
                sequences, self.state.step, go_on=lambda done, total: show(done, total) or not self.stopping(),
            )
        if result is None:
            return None
        record = {"step": self.state.step, "tokens": self.state.tokens, **result}
        self.eval_file.write(record)
        self.wandb.evaluation(record)
        bits = result["bits_per_byte"]  # None where the held-out tokens are control tokens alone
        self.console.say(
            f"step {self.state.step}  evaluation of {size}: loss {result['loss']:.4f}, "
            + ("" if bits is None else f"{bits:.4f} bits per byte, ")
            + f"{time.perf_counter() - begin:.1f} s"
        )
        return record

    def whole_evaluation_of_this_step(self) -> dict | None:
        """The record of an earlier start of this finished run, if it got that far; the first rank knows."""
        records = self.eval_file.records() if self.leads else []
        records = [record for record in records if record["step"] == self.state.step and record["whole"]]
        return self.ranks.first_object(records[-1] if records else None, "an earlier evaluation")

    def leave_save(self) -> None:
        """Another rank has failed: give a save under way some time."""
        self.store.leave(min(LEAVE, self.config.parallel.timeout))

    def roll_back(self) -> None:
        """Back to the newest complete checkpoint, with the samples that come next (see `guard`)."""
        self.store.wait()
        path = self.store.open_newest(self.console.say)
        if path is None:
            self.console.say("guard.spikes=rollback: there is no checkpoint yet; the step is skipped and nothing more")
            return
        self.rolled_back[path] += 1
        limit = self.config.guard.rollbacks
        if self.rolled_back[path] > limit:
            raise RunFailure(
                f"a spike of the loss at step {self.state.step}, the {limit + 1}. since {path.name} "
                f"(guard.rollbacks={limit}); lower the learning rate, or choose another checkpoint or guard.spikes=skip"
            )
        here.at(0, f"going back to {path}")
        lines = restore(self.model, self.optimizer, path, self.stepper.ema)
        self.state.roll_back(RunState(**CheckpointStore.meta(path)["state"]))
        self.console.say(
            f"back to the weights of {path.name} and {self.state.tokens:,} tokens; samples go on at "
            f"{self.state.samples:,}"
        )
        for line in lines:
            self.console.say(line)

    def save(self) -> None:
        """Save in the background, once for each step."""
        if self.saved_step == self.state.step:
            return
        self.saved_step = self.state.step
        here.at(0, f"saving step {self.state.step}")
        meta = {"format": 1, "state": self.state.to_meta(), "data": self.data_fingerprint, "torch": torch.__version__}
        tensors = run_tensors(self.model, self.optimizer, self.stepper.ema)
        self.store.save(self.state.step, tensors, meta, self.files)
