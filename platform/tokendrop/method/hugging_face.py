"""Random-LTD in Hugging Face's Trainer.

callback = RandomLtdCallback(start=64, increment=16, every=50)
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from tokendrop.method.attach import attach, detach, repeated_layers


class RandomLtdCallback(TrainerCallback, ExportableState):
    """Layers drop tokens from the begin of training to its end; the model that is left is the plain one.

    The kept length grows by `increment` tokens every so many optimizer steps, up to the length of the sequences.
    Draws are keyed by (seed, optimizer step, place in the global batch, layer): a run that is resumed makes the same.
    Each line of the Trainer's log history has `layer_tokens`, of all processes where their sequences are as long as
    those of this one, and `kept_length`.

    Source: Yao et al. 2022, arXiv:2211.11586, sections 3.1 and 3.2.
    """

    def __init__(
        self,
        *,
        start: int,
        increment: int,
        every: int,
        seed: int = 1234,
        full_length_layers: Sequence[int] = (0, -1),
        always_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            start: tokens kept at the first step.
            increment: more tokens at each jump.
            every: optimizer steps from one jump to the next.
            full_length_layers: layers that see every token, numbered from 0, or from the end when negative.
            always_ids: token ids that are never dropped, such as that of [CLS].
        Raises:
            ValueError: a number is out of range.
        """
        self._settings = {
            "start": start,
            "increment": increment,
            "every": every,
            "seed": seed,
            "full_length_layers": list(full_length_layers),
            "always_ids": list(always_ids),
        }
        if min(start, increment, every) < 1:
            raise ValueError(f"want start, increment and every of at least 1, got {start}, {increment} and {every}")
        self.start, self.increment, self.every = start, increment, every
        self.seed, self.full_length_layers, self.always_ids = seed, tuple(full_length_layers), list(always_ids)
        self.layer_tokens = 0
        """Consumed since the run began: by this process, times the number of processes."""
        self._step = self._batch = self._kept = 0
        self._hook: Any = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the Trainer keeps."""
        return {"args": self._settings, "attributes": {"layer_tokens": self.layer_tokens}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        _check_parallel(args, model)
        if self._hook:  # of a run that failed
            self.on_train_end(args, state, control, model=model)
        callbacks: Any = state.stateful_callbacks  # what a checkpoint kept, by name
        saved = callbacks.get(type(self).__name__, {})
        self.layer_tokens = saved.get("attributes", {}).get("layer_tokens", 0) if state.global_step else 0
        self._layers = list(repeated_layers(model))
        self._dropping = attach(model, seed=self.seed, full_length_layers=self.full_length_layers, blocks=self._layers)
        self._batches, self._batch_size = args.gradient_accumulation_steps, args.train_batch_size
        self._processes, self._rank = args.world_size, args.process_index
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._step, self._batch = state.global_step, 0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.log_history[-1] |= {"layer_tokens": self.layer_tokens, "kept_length": self._kept}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        self._hook.remove()
        self._hook = None
        detach(model)

    def _before_forward(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Draw for the micro batch that the model is about to train on."""
        if not model.training:
            return
        ids_BS = named.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids_BS, Tensor):
            raise ValueError("RandomLtdCallback: want batches with input_ids, by which a batch's size is told")
        batch, length = ids_BS.shape
        first = ((self._step * self._batches + self._batch) * self._processes + self._rank) * self._batch_size
        self._batch += 1
        self._kept = min(length, self.start + self.increment * (self._step // self.every))
        self._dropping.draw(
            kept_length=self._kept,
            step=self._step,
            sample_ids=torch.arange(first, first + batch),
            sequence_length=length,
            device=ids_BS.device,
            always=torch.isin(ids_BS.cpu(), torch.tensor(self.always_ids)) if self.always_ids else (),
        )
        whole = len(self._layers) - len(self._dropping.layers)
        tokens = whole * length + len(self._dropping.layers) * self._kept
        self.layer_tokens += batch * self._processes * tokens


def _check_parallel(args: TrainingArguments, model: nn.Module) -> None:
    """Raises ValueError where processes or threads of the Trainer share samples, or this callback."""
    if args.n_gpu > 1:
        raise ValueError(
            f"RandomLtdCallback: the Trainer would run replicas on {args.n_gpu} GPUs in threads of this process, which"
            " would share one draw; want torchrun, or one visible GPU"
        )
    config = getattr(args, "parallelism_config", None)
    sizes = {"tensor": getattr(model, "tp_size", None) or getattr(config, "tp_size", 1)}
    sizes |= {"context": getattr(config, "cp_size", 1), "sequence": getattr(config, "sp_size", 1)}
    for kind, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"RandomLtdCallback: {size} {kind}-parallel processes would each drop other tokens of the same samples;"
                " want data parallelism alone"
            )
