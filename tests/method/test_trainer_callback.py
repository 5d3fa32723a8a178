"""Random-LTD in Hugging Face's own Trainer, on GPT-2 and BERT."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tokendrop.method import DroppedLayer

transformers = pytest.importorskip("transformers")
ParallelismConfig = pytest.importorskip("accelerate").ParallelismConfig

from tokendrop.method.hugging_face import RandomLtdCallback  # noqa: E402 - wants transformers

TOKENS, VOCAB, ROWS, LAYERS = 12, 40, 32, 4
SIZES = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
SETTINGS = {"start": 4, "increment": 4, "every": 3, "seed": 5}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=16, n_head=2, n_positions=TOKENS, **SIZES)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=TOKENS,
    )
    return transformers.BertForMaskedLM(config)


MODELS = {"gpt2": gpt2, "bert": bert}


class Samples(torch.utils.data.Dataset):
    """Rows of a pattern that can be learned."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = (torch.arange(TOKENS) * 3 + number) % VOCAB
        return {"input_ids": ids, "labels": ids}


def train(name: str, folder: Path, *callbacks: object, resume: bool = False, **settings: object):
    """The Trainer after its run, with a checkpoint at step 4."""
    torch.manual_seed(0)
    arguments = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_steps": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "seed": 7,
        **settings,
    }
    trainer = transformers.Trainer(
        model=MODELS[name](),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=Samples(),
        eval_dataset=Samples(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def history(trainer, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_drops_tokens_by_its_schedule_and_leaves_a_plain_model(name: str, tmp_path: Path) -> None:
    trainer = train(name, tmp_path, RandomLtdCallback(**SETTINGS))
    assert history(trainer, "kept_length") == [4, 4, 4, 8, 8, 8, 12, 12]
    of_step = [4 * (2 * TOKENS + 2 * kept) for kept in history(trainer, "kept_length")]
    assert history(trainer, "layer_tokens") == [sum(of_step[: step + 1]) for step in range(8)]
    assert not any(isinstance(module, DroppedLayer) for module in trainer.model.modules())
    assert trainer.model.state_dict().keys() == MODELS[name]().state_dict().keys()
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_at_full_length_it_is_the_trainer_alone(name: str, tmp_path: Path) -> None:
    full = RandomLtdCallback(**{**SETTINGS, "start": TOKENS})
    dropped, plain = train(name, tmp_path / "dropped", full), train(name, tmp_path / "plain")
    assert history(dropped, "loss") == history(plain, "loss")
    with_drops = train(name, tmp_path / "short", RandomLtdCallback(**SETTINGS))
    assert history(with_drops, "loss") != history(plain, "loss")


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(restores: bool, tmp_path: Path) -> None:
    whole = train("gpt2", tmp_path, RandomLtdCallback(**SETTINGS))
    shutil.rmtree(tmp_path / "checkpoint-8")
    settings = {"restore_callback_states_from_checkpoint": restores}
    resumed = train("gpt2", tmp_path, RandomLtdCallback(**SETTINGS), resume=True, **settings)
    for key in ("loss", "layer_tokens", "kept_length"):
        assert history(resumed, key) == history(whole, key)


def test_tokens_of_some_ids_are_never_dropped(tmp_path: Path) -> None:
    always = [int(Samples()[0]["input_ids"][5])]
    seen: list[int] = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, *, model, **_):
            model.register_forward_hook(self.check, with_kwargs=True)

        def check(self, model, arguments, inputs, out):
            for ids, kept in zip(inputs["input_ids"], callback._dropping.kept(1), strict=True):
                stays = (ids == always[0]).nonzero().flatten().tolist()
                assert set(stays) <= set(kept.tolist())
                seen.extend(stays)

    callback = RandomLtdCallback(**SETTINGS, always_ids=always)
    train("bert", tmp_path, callback, Watch(), max_steps=3)
    assert seen


@pytest.mark.parametrize(
    ("where", "said"),
    [("_n_gpu", "replicas on 2 GPUs in threads"), ("tp_size", "2 tensor-parallel"), ("cp_size", "2 context-parallel")],
)
def test_processes_and_threads_that_share_samples_are_refused(where: str, said: str, tmp_path: Path) -> None:
    arguments, model = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), gpt2()
    if where == "tp_size":
        model._tp_size = 2  # as loading with a plan of tensor parallelism leaves it
    elif where == "cp_size":
        arguments.parallelism_config = ParallelismConfig(cp_size=2)
    else:
        arguments._n_gpu = 2  # what it finds where two are visible
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    with pytest.raises(ValueError, match=said):
        RandomLtdCallback(**SETTINGS).on_train_begin(arguments, state, control, model=model)
    assert not any(isinstance(module, DroppedLayer) for module in model.modules())


def test_what_can_not_go_with_drops_is_refused_in_the_first_pass(tmp_path: Path) -> None:
    class Cached(Samples):
        def __getitem__(self, number: int) -> dict[str, Tensor]:
            return super().__getitem__(number) | {"use_cache": torch.tensor(True)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    callback = RandomLtdCallback(**SETTINGS)
    trainer = transformers.Trainer(model=gpt2(), args=arguments, train_dataset=Cached(), callbacks=[callback])
    with pytest.raises(ValueError, match="use_cache=True: keys and values"):
        trainer.train()
    assert callback.layer_tokens > 0  # drawn for, and not run


def test_batches_without_ids_are_refused_in_one_sentence(tmp_path: Path) -> None:
    class Embedded(Samples):
        def __getitem__(self, number: int) -> dict[str, Tensor]:
            return {"inputs_embeds": torch.randn(TOKENS, 16), "labels": super().__getitem__(number)["labels"]}

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(
        model=gpt2(), args=arguments, train_dataset=Embedded(), callbacks=[RandomLtdCallback(**SETTINGS)]
    )
    with pytest.raises(ValueError, match="want batches with input_ids"):
        trainer.train()
