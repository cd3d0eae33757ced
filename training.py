"""What the loops of all trainers have in common: where a run begins or goes on, and what surrounds the gradient of a step.

    training = Training(flags, saved, processes, make_model, digest)
    while training.goes_on():
        training.begin_step()
        for rows in training.micro_batches():
            ...                                   # forward and backward on these rows: the trainer's own
        training.end_step(loss)
        if training.due(flags.eval_every):
            ...
        if training.due(flags.save_every):
            training.save()

A run that is killed at any moment and resumed computes what an undisturbed one would have: the batch is a function of the
step, and everything else that moves is in the checkpoint.
"""

import math
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import run
from checkpoint import load_checkpoint, load_run, load_weights, restore, run_id, save_checkpoint, save_model
from files import one_line
from flags import SharedFlags, UserError, fail
from metrics import Metrics


class Training:
    """A run that is training. step: updates done; model: the raw Transformer; forward: the function to train with.

    make_model: called without arguments; digest: of the training data, None where a seed makes it; schedule: (step, flags) ->
    learning rate. Opens the run folder, takes or reads the decisions, and restores the last checkpoint if there is one.
    Raises UserError.
    """

    def __init__(self, flags, saved, processes, make_model, digest=None, schedule=run.learning_rate):
        self.flags, self.processes, self.schedule = flags, processes, schedule
        data = f"--data={flags.data}" if digest else ""
        if saved and saved.get("data") != digest:
            raise UserError(f"{data}: the text or its tokens have changed since this run began; restore them, or start anew "
                            "with another --out")
        self.step, state, complaints = load_checkpoint(flags.out, run_id(saved)) if saved else (0, None, [])
        for complaint in complaints:
            print(f"warning: {complaint}; the checkpoint before it is used", file=sys.stderr)
        processes.require_same(digest, f"{data}: has another text here than on process 0; copy --cache-dir")
        processes.require_same(self.step, f"--out={flags.out}: has other checkpoints here than on process 0; use a shared "
                               "folder")
        self.model = self._make_model(make_model, fresh=state is None)
        decisions = run.decide(flags, self.model, saved and saved.get("decisions", {}), processes.count)
        self.decisions = processes.from_first(decisions)
        self.device = self.decisions["device"]
        if not self.model.scorers()[0].trains_qk:
            print(f"note: {flags.scorer} gives no gradient to queries and keys, which stay as initialised")
        self.folder = run.open_run(flags, saved) if processes.first else Path(flags.out)
        if not saved and processes.first:
            saved = run.write_config(self.folder, flags, self.model, self.decisions, data=digest)
        self.id = saved and run_id(saved)  # process 0 has it, which writes the weights
        self._restore(state)
        processes.get_in_step()
        self.metrics = Metrics(self.folder, self.step, processes.number, state and state.get("metrics"))
        self.eval_model = run.compiled(self.model, self.decisions)
        self.forward, self.rows = processes.wrap(self.eval_model), processes.rows(flags.batch_size)
        self.interrupted, self.stop = run.Interrupted(), False
        self.start = self.step_start = time.perf_counter()
        self.bar = tqdm(total=flags.steps, initial=self.step, unit="step", dynamic_ncols=True,
                        disable=None if processes.first else True)

    def _make_model(self, make_model, fresh):
        """The model, its weights random by --seed, or (if fresh) those of --init-from."""
        torch.manual_seed(self.flags.seed)
        try:
            model = make_model()
        except RuntimeError as error:
            raise UserError(f"--n-embd={self.flags.n_embd} --n-layer={self.flags.n_layer}: the model does not fit into memory "
                            f"({one_line(error)}); make it smaller") from None
        if self.flags.init_from and fresh:
            trained, config = load_run(self.flags.init_from)
            scorer = config["model"]["scorer"]
            # The scalars of another scorer are of no use here: then ours start from the flags. Those of the same scorer go on,
            # unless flags say where to start.
            given = {"b": self.flags.ssa_b != SharedFlags.ssa_b, "n": self.flags.ssa_n != SharedFlags.ssa_n,
                     "tau": self.flags.tau != SharedFlags.tau}
            anew = [f".raw_{name}" for name in given if given[name]] if scorer == self.flags.scorer else [".scorer."]
            load_weights(model, trained.state_dict(), Path(self.flags.init_from) / "model.safetensors", skip=anew)
            if scorer == self.flags.scorer and any(not given[name] for name in run.scorer_values(model)):
                print(f"note: {', '.join(name for name in run.scorer_values(model) if not given[name])} of {scorer} as in "
                      f"{self.flags.init_from}")
        return model

    def _restore(self, state):
        """The optimiser, and everything as it was after `step` updates."""
        self.optimizer = run.make_optimizer(self.model.to(self.device), self.flags)
        self.scorer_start, self.seconds_before = run.scorer_values(self.model), 0.0
        torch.manual_seed(self.flags.seed + 1)  # dropout's stream, whatever the initial weights have drawn
        if state:
            restore(self.model, self.optimizer, state, f"{self.flags.out}: checkpoint {self.step}")
            run.set_random_state(state["random"], self.device)
            self.scorer_start, self.seconds_before = state["scorer_start"], state["seconds"]
            if self.processes.first:  # a kill may have come between the last checkpoint and these weights
                save_model(self.folder / "model.safetensors", self.model, self.step, self.id)
            print(f"resumed after step {self.step}")

    @property
    def seconds(self):
        """Spent on this run so far, before it was resumed too."""
        return self.seconds_before + time.perf_counter() - self.start

    def goes_on(self):
        """Whether there is another step to do: neither the last one done nor a signal received, by any process."""
        return self.step < self.flags.steps and not self.stop

    def due(self, every):
        """Whether this step is one of `every` so many, or the last."""
        return self.step % every == 0 or self.step == self.flags.steps

    def begin_step(self):
        self.step_start = time.perf_counter()
        self.lr = self.schedule(self.step, self.flags)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if self.flags.dropout:
            self.processes.seed_dropout(self.flags.seed, self.step)

    def micro_batches(self):
        """This process's rows of the batch, a micro-batch at a time."""
        size = self.decisions["micro_batch"]
        for first in range(0, len(self.rows), size):
            if self.processes.many:  # gradients are added up in the last backward pass; DDP must know before the forward pass
                self.forward.require_backward_grad_sync = first + size == len(self.rows)
            yield self.rows[first : first + size]

    def end_step(self, loss):
        """The update. loss: this process's, such that the mean over processes is the step's. Returns that mean and the
        gradient's norm; stops the program where one is not finite."""
        if self.step == 0:
            run.require_scorer_in_effect(self.model)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.flags.clip).item()
        # What the processes must agree on, in one exchange: the mean loss, and whether anyone was told to stop.
        loss, stop = self.processes.sum(float(loss) / self.processes.count, bool(self.interrupted))
        self.stop = bool(stop)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.bar.close()
            kept = "the last checkpoint is kept" if any(self.folder.glob("resume-*.pt")) else "before the first checkpoint"
            fail(f"step {self.step + 1}: the loss is {loss}, the gradient's norm {grad_norm}; stopped, {kept} in {self.folder}; "
                 f"try a smaller --lr than {self.flags.lr}", code=1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.bar.update()
        return loss, grad_norm

    def save(self):
        run.require_finite_weights(self.model, self.step)
        if not self.processes.first:
            return
        self.metrics.sync()
        save_checkpoint(self.folder, self.step, self.model, dict(
            model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), random=run.random_state(self.device),
            scorer_start=self.scorer_start, seconds=self.seconds, metrics=self.metrics.mark()), self.id)

    def end(self):
        """After the loop: whether this process is the one to finish the complete run. Of a run that was stopped it says how to
        continue, and exits with 128 plus the signal's number, as the shell would: what follows with && must not take it for
        trained."""
        self.bar.close()
        self.processes.end()
        complete = self.step == self.flags.steps
        if complete:
            self.interrupted.end_at_once(f"interrupted after the last step; {self.folder / 'model.safetensors'} is whole, and "
                                         "--resume does what was left to do")
        elif self.processes.first:
            told = self.interrupted.signal or "a signal to another process"
            print(f"{told}: saved after step {self.step}; continue with\n  {run.resume_command(self.flags)}")
        if not complete:
            sys.exit(128 + signal.Signals[self.interrupted.signal or "SIGTERM"])
        return self.processes.first

    def scorer_changes(self):
        """{"max_change_b": the largest |change| of any head since the run began, ...}, for the summary."""
        changes = run.largest_change(self.scorer_start, run.scorer_values(self.model))
        return {f"max_change_{name}": change for name, change in changes.items()}
