"""What is wrong in a job is said in one sentence that names the key."""

from pathlib import Path

import pytest

from tokendrop.config.load import load_job
from tokendrop.errors import UserError

REST = "name: x\ndata: {corpus: [a]}\ntrain: {length: 1, global_batch: 1, micro_batch: 1, peak_lr: 1}\n"


def message(job: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_job(job, overrides)
    assert type(caught.value) is UserError
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


SEGMENTS = "scaling={mode: schedule, segments: [{from: 0%"
PROFILE = "scaling={mode: schedule, profile: a100-40g-8"

# override: what the sentence must say, beginning with the key
MISTAKES = {
    # unknown keys, at any depth, with the nearest match
    "sede=1": "sede: unknown key; did you mean 'seed'?",
    "train.lenght=5": "train.lenght: unknown key; did you mean 'train.length'?",
    "drop.scheduel=1": "drop.scheduel: unknown key; did you mean 'drop.schedule'?",
    "drop.schedule.strat=1": "drop.schedule.strat: unknown key; did you mean 'drop.schedule.start'?",
    # and with a key of another branch
    "length=5": "length: unknown key; did you mean 'train.length'?",
    "lenght=5": "lenght: unknown key; did you mean 'train.length'?",
    "within_node=1": "within_node: unknown key; did you mean 'scaling.profile.within_node'?",
    "drop.start=1": "drop.start: unknown key; did you mean 'drop.schedule.start'?",
    "weight=1": "weight: unknown key; want one of name, seed,",  # sources are a list
    "track.xyzzy=1": "track.xyzzy: unknown key; want one of uri, experiment",
    "1=2": "1: unknown key",
    # wrong types
    "seed=abc": "seed: want a whole number, got 'abc'",
    "seed=1.5": "seed: want a whole number, got 1.5",
    "seed=true": "seed: want a whole number, got True",
    "seed=[1]": "seed: want a whole number, got a list",
    "seed=1e30": "seed: want a whole number",
    "seed=1000000000000000000000": "seed: want a whole number below 2**63",
    "name=3": "name: want text, got 3",
    "train.peak_lr={a: 1}": "train.peak_lr: want a number, got a mapping",
    "train.compile=1": "train.compile: want true or false, or static, got 1",
    "train.zero_stage=true": "train.zero_stage: want one of 1, 2, 3, got True",
    "train.warmup=soon": "train.warmup: want a duration such as '350 steps'",
    "train.length=": "train.length: want a duration",
    "train=5": "train: want a mapping of keys, got 5",
    "model=gpt": "model: want a mapping of keys, got 'gpt'",
    "data.corpus=python": "data.corpus: want a list, got 'python'",
    "data.corpus=[python, 3]": "data.corpus[1]: want text, got 3",
    "drop.full_length_layers=[0, x]": "drop.full_length_layers[1]: want a whole number, got 'x'",
    "drop.full_length_layers=middle": "drop.full_length_layers: want one of none, first, last, first_and_last",
    # numbers that are none
    "train.peak_lr=.inf": "train.peak_lr: want a number below 2**63, got inf",
    "train.peak_lr=.nan": "train.peak_lr: want a number, got nan",
    "train.peak_lr='inf'": "train.peak_lr: want a number, got 'inf'",
    "train.warmup=.inf": "train.warmup: want a duration",
    "train.length=1e999 steps": "train.length: want a duration",
    "train.length=1e30 steps": "train.length: a duration can't exceed 1e+18 steps",
    # unknown kinds, presets and choices
    "model.kind=gtp": "model.kind: want one of gpt, bert, vit, got 'gtp'; did you mean 'gpt'?",
    "model.kind=[gpt]": "model.kind: want one of gpt, bert",
    "drop.schedule.kind=linaer": "drop.schedule.kind: want one of mslg, linear",
    "model.preset=gpt-5": "model.preset: want one of gpt-1m",
    "model.preset=[gpt-5m]": "model.preset: want one of gpt-1m",
    "train.decay=cosin": "train.decay: want one of linear, cosine, constant, wsd, got 'cosin'; did you mean 'cosine'?",
    "train.strategy=fdsp": "train.strategy: want one of ddp, fsdp, deepspeed, got 'fdsp'; did you mean 'fsdp'?",
    "train.zero_stage=4": "train.zero_stage: want one of 1, 2, 3",
    # missing keys
    "drop.schedule={kind: constant}": "drop.schedule.kept: this key is needed and missing",
    "drop.schedule={kind: piecewise, stages: [{at: 0}]}": "drop.schedule.stages[0].kept: this key is needed",
    # values out of range
    "name=a/b": "name: want letters, digits",
    "run=..": "run: want letters, digits, '-', '_' and '.', not dots alone, got '..'",
    "model.width=0": "model: want layers, width, heads",
    "model.layers=1000000000000": "model: want at most 10,000 layers",
    "model.heads=3": "model: width=128 must be a multiple of heads=3",
    "model.dropout=1": "model: want 0 <= dropout < 1",
    "data.corpus=[]": "data: want either corpus, with at least one file",
    "data.sources=[{name: a, corpus: [x], weight: 1}]": "data: want either corpus",
    "data.only=Books": "data.only: want a list, got 'Books'",
    "data.validation_share=1": "data: want 0 < validation_share < 1",
    "data.validation_share=0": "data: want 0 < validation_share < 1",
    "data.test_share=0.99": "data: want 0 < validation_share < 1 and 0 <= test_share < 1 - validation_share",
    "data.test_share=-0.1": "data: want 0 < validation_share < 1 and 0 <= test_share",
    "data.max_rejected=1.5": "data: want 0 <= max_rejected <= 1, got 1.5",
    "data.max_rejected=-1": "data: want 0 <= max_rejected <= 1, got -1",
    "data.max_document_bytes=0": "data: want rows_per_shard and max_document_bytes of at least 1",
    "data.shuffle_rows=-1": "data: want rows_per_shard and max_document_bytes of at least 1, shuffle_rows of",
    "data.tokenizer_vocab_size=5": "data.tokenizer_vocab_size: 256 bytes",
    "data.rows_per_shard=0": "data: want rows_per_shard and max_document_bytes of at least 1",
    "data.pairs={mask_share: 0}": "data.pairs: want 0 < mask_share <= 1 and 0 <= short_share <= 1, got 0 and 0.1",
    "data.pairs={max_predictions: 0}": "data.pairs: want max_predictions of at least 1, got 0",
    "data.pairs={sentence_task: nps}": (
        "data.pairs.sentence_task: want one of sop, nsp, none, got 'nps'; did you mean 'nsp'?"
    ),
    "data.pairs={sentence_task: nsp}": (
        "data.pairs: only a task of kind masked_lm reads pairs of sentences, not 'causal_lm'"
    ),
    "model={kind: bert, layers: 1, width: 8, heads: 1, sequence_length: 4, vocab_size: 9}": (
        "model: want a sequence_length of at least 5"
    ),
    "scaling.workers=0": "scaling: want workers",
    "scaling.peer_timeout_s=0": "scaling: want peer_timeout_s",
    "checkpoint.keep=0": "checkpoint: want every above 0 and keep",
    "evaluate.every=0 steps": "evaluate: want every above 0",
    "train.peak_lr=0": "train: want 0 <= final_lr <= peak_lr",
    "train.final_lr=1": "train: want 0 <= final_lr <= peak_lr",
    "train.beta2=1": "train: want 0 <= beta1, beta2 < 1",
    "train.max_grad_norm=0": "train: want peak_lr, max_grad_norm and epsilon above 0",
    "train.micro_batch=0": "train: want global_batch and micro_batch of at least 1",
    "train.length=0 steps": "train.length: want steps, tokens or epochs, more than 0",
    "train.length=70%": "train.length: want steps, tokens or epochs",
    # rules over two branches
    "train.global_batch=17": "train.global_batch: global batch 17 must be a multiple of micro batch",
    "scaling.workers=5": "train.global_batch: global batch",
    "train.warmup=1e6 steps": "train.warmup: the warm-up of",
    "drop.schedule.start=257": "drop.schedule: want 0 < start <= full, got start=257, full=256",
    "drop.schedule.start=0": "drop.schedule: want 0 < start",
    "drop.schedule.increment=0": "drop.schedule: want an increment of at least 1",
    "drop.schedule.until=0%": "drop.schedule: want more than 0 steps between jumps",
    "drop.schedule={kind: constant, kept: 257}": "drop.schedule: a kept length of 257 is over",
    "drop.schedule={kind: mslg, start: 8, increment: 8, every: 1 step, full: 999}": "drop.schedule: a kept length",
    "drop.schedule={kind: piecewise, stages: []}": "drop.schedule: want a first stage at step 0",
    "drop.full_length_layers=[4]": "drop.full_length_layers: want numbers of 4 layers, got [4]",
    # workers
    "scaling.deadline_hours=2": "scaling: mode is 'fixed', so segments, min_workers",
    "scaling.mode=elastic": "scaling.mode: want one of fixed, schedule, fit_per_segment",
    "scaling.mode=schedule": "scaling: mode 'schedule' wants segments, or a profile",
    f"{SEGMENTS}, workers: 2}}], deadline_hours: 2}}": "scaling: segments give the workers outright",
    f"{SEGMENTS}, workers: 0}}]}}": "scaling.segments[0]: want workers of at least 1, got 0",
    f"{SEGMENTS}, workers: 3}}]}}": "scaling: global batch 16 must be a multiple of micro batch 8 x 3 workers",
    f"{SEGMENTS}, worker: 3}}]}}": "scaling.segments[0].worker: unknown key; did you mean 'scaling.segments[0].workers",
    f"{SEGMENTS}}}]}}": "scaling.segments[0].workers: this key is needed and missing",
    "scaling={mode: schedule, segments: [{workers: 3}]}": "scaling.segments[0].from: this key is needed and missing",
    "scaling={mode: schedule, segments: [{from: 40%, workers: 1}]}": "scaling: want first steps that rise from 0",
    "scaling.profile=a100": "scaling.profile: want a100-40g-8, h200-8 or a .yaml or .json file, got 'a100'",
    "scaling.profile={kind: measured}": "scaling.profile.name: this key is needed and missing",
    "scaling.profile={kind: guessed}": "scaling.profile.kind: want one of measured, derived, got 'guessed'",
    f"{PROFILE}, min_workers: 3}}": "scaling: want 1 <= min_workers <= max_workers",
    f"{PROFILE}, min_workers: 3, max_workers: 9}}": "scaling: no number of workers from 3 to 9 divides the 2 micro",
    f"{PROFILE}, deadline_hours: 1e-6}}": "scaling: deadline_hours=1e-06 can't be met: with 1 to 1 workers",
    f"{PROFILE}, minimise: time, budget_usd: 1e-6}}": "scaling: budget_usd=1e-06 can't be kept",
    f"{PROFILE}, deadline_hours: 0}}": "scaling: want deadline_hours, budget_gpu_hours and budget_usd above 0",
    f"{PROFILE}, budget_usd: 5}}": "scaling: a budget goes with minimise: time",
    f"{PROFILE}, minimise: time, deadline_hours: 5}}": "scaling: deadline_hours goes with minimise: cost",
    f"{PROFILE}, minimise: time, budget_usd: 5, budget_gpu_hours: 5}}": "scaling: want one budget",
    "train.zero_stage=3": "train: strategy is 'ddp', so zero_stage=3 would do nothing",
    "drop.method=none": "drop: method is 'none', so this schedule would do nothing",
}

# sources in the place of a corpus, and what the sentence must say
SOURCE_MISTAKES = {
    "{name: a, corpus: [x]}": "data.sources[0].weight: this key is needed and missing",
    "{corpus: [x], weight: 1}": "data.sources[0].name: this key is needed and missing",
    "{name: a, corpus: [], weight: 1}": "data.sources[0].corpus: want at least one file",
    "{name: a, corpus: x, weight: 1}": "data.sources[0].corpus: want a list, got 'x'",
    "{name: a, corpus: [x], weight: 0}": "data.sources[0]: want a weight above 0, got 0",
    "{name: a, corpus: [x], weight: -1}": "data.sources[0]: want a weight above 0, got -1",
    "{name: a, corpus: [x], weight: .nan}": "data.sources[0].weight: want a number, got nan",
    "{name: a/b, corpus: [x], weight: 1}": "data.sources[0].name: want letters, digits, '_' and '.'",
    "{name: '', corpus: [x], weight: 1}": "data.sources[0].name: want letters, digits",
    "{name: a, corpus: [x], wieght: 1}": "data.sources[0].wieght: unknown key; did you mean 'data.sources[0].weight'",
    "{name: a, corpus: [x], weight: 1}, {name: a, corpus: [y], weight: 1}": "data.sources: want a name",
}


@pytest.mark.parametrize("sources", SOURCE_MISTAKES)
def test_a_mistake_in_a_source_is_named_by_its_place(sources: str, job: Path) -> None:
    said = message(job, f"data={{corpus: [], sources: [{sources}]}}")
    assert said.startswith(f"{job}: {SOURCE_MISTAKES[sources]}")


def test_sets_are_chosen_in_each_source(job: Path) -> None:
    said = message(job, "data={corpus: [], only: [Books], sources: [{name: a, corpus: [x], weight: 1}]}")
    assert said.startswith(f"{job}: data.only: with sources, say it in each of them")


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named_by_file_and_key(override: str, job: Path) -> None:
    assert message(job, override).startswith(f"{job}: {MISTAKES[override]}")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.warmup=5 epochs", "train.warmup: the warm-up of "),
        ("train.global_batch=17", "train.global_batch: global batch 17 must be a multiple of micro batch 8 x 1 work"),
        ("data={corpus: [], sources: [{name: a, corpus: [x], weight: 1}]}", "data.sources: want durations in steps,"),
    ],
)
def test_what_no_length_of_an_epoch_makes_right_is_refused_before_one_is_counted(override, says, job: Path) -> None:
    assert message(job, "train.length=3 epochs", override).startswith(f"{job}: {says}")


@pytest.mark.parametrize("override", ["train.warmup=5000 steps", "train.warmup=1e9 tokens", "train.cooldown=1 epochs"])
def test_what_some_length_of_an_epoch_makes_right_waits_for_the_count(override: str, job: Path) -> None:
    assert load_job(job, ["train.length=3 epochs", override]).waits_for_epochs


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.precision=fp64"], "precision: strategy 'deepspeed' keeps weights in fp32"),
        (["train.compile=true", "train.zero_stage=3"], "compile: not with zero_stage=3"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(overrides: list[str], says: str, job: Path) -> None:
    assert message(job, "train.strategy=deepspeed", *overrides).startswith(f"{job}: train.{says}")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "want key=value"),
        ("=5", "want key=value"),
        ("", "want key=value"),
        ("name.x=1", "'name' holds 'random-ltd'"),
        ("data.corpus.0=x", "'corpus' holds a list"),
        ("seed=[1", "not valid YAML"),
        ("seed=2024-99-99", "not valid YAML"),
        ("seed=!!int ''", "not valid YAML"),
        ("seed=" + "[" * 5000, "not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(override: str, says: str, job: Path) -> None:
    text = message(job, override)
    quoted = repr(override)
    assert text.startswith(f"override {quoted if len(quoted) <= 120 else quoted[:120] + '...'}: ")
    assert says in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "want a mapping of keys such as 'model:' and 'train:', got a list"),
        ("", "want a mapping of keys such as 'model:' and 'train:', got nothing"),
        ("just text", "got 'just text'"),
        ("a: [1,\nb: }", "not valid YAML"),
        ("a: 2024-99-99", "not valid YAML"),
        ("a: !!timestamp x", "not valid YAML"),
        ("a: !!python/name:os.system x", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        (b"\xff\xfe\x00", "a job file must be UTF-8 text"),
        ("base: [a, b]", "base: want the path of one job file, got a list"),
        ('base: "a\\0b"', "can't read this job file"),
        ("base: nowhere.yaml", "can't read this job file (No such file or directory)"),
        ("{}", "name: this key is needed and missing"),
        (f"{REST}model: {{layers: 1}}", "model.kind: this key is needed: one of gpt, bert"),
        (f"{REST}model: {{kind: gpt, layers: 1}}", "model.width: this key is needed and missing"),
    ],
)
def test_a_file_that_is_no_job_is_named_with_the_reason(text: str | bytes, says: str, tmp_path: Path) -> None:
    sentence = message(written(tmp_path, text))
    assert sentence.startswith(str(tmp_path))
    assert says in sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "want a mapping of keys such as 'speeds:' and 'within_node:', got a list"),
        ("a: [", "not valid YAML"),
        (b"\xff\xfe", "a device profile must be UTF-8 text"),
        (None, "can't read this device profile (No such file or directory)"),
    ],
)
def test_a_file_that_is_no_profile_is_named(text: str | bytes | None, says: str, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml" if text is None else written(tmp_path, text)
    sentence = message(job, f"scaling.profile={path}")
    assert str(path) in sentence
    assert says in sentence


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert message(tmp_path / "gone.yaml").startswith(f"{tmp_path / 'gone.yaml'}: can't read this job file")
    assert message(tmp_path) == f"{tmp_path}: this is a folder; want a job file (.yaml)"


def test_a_base_of_a_base_is_refused_by_name(job: Path, tmp_path: Path) -> None:
    assert message(written(tmp_path, f"base: {job}\n")) == f"{job}: base: a base job can't have a base of its own"
