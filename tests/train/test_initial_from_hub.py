"""A job begins with a model by its name on the Hugging Face hub: from the hub, and then from the cache."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from transformers import BertConfig, BertForPreTraining, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from hub import hub

ROOT = Path(__file__).parents[2]
BERT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}
VIT: dict[str, Any] = {"img_size": 12, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
KINDS = {"owner/gpt2": "gpt", "owner/bert": "bert", "owner/classifier": "bert", "owner/vit": "vit"}
"""The models of the hub, with the kinds of the jobs that begin with them."""
_WANTED = "want a run, a checkpoint, or a"
MISTAKES = {
    "owner/missing": ("gpt", rf"{_WANTED} model of Hugging Face .* \(owner/missing is not a local folder .*\)"),
    "owner/empty": ("gpt", rf"{_WANTED} model of Hugging Face .* \(Unrecognized model .*\)"),
    "owner/no-weights": ("bert", r"want the weights of a model, whole \(.* a file named .* model\.safetensors\)"),
    "owner/missing-vit": ("vit", rf"{_WANTED} ViT of timm: .* \(.*\)"),
    "owner/no-weights-vit": ("vit", rf"{_WANTED} ViT of timm: .* \(.*\)"),
}
"""Names, with the kinds of jobs, and what these say."""
NOT_CACHED = {"owner/never-asked": "gpt", "owner/never-asked-vit": "vit"}
NAMES = ["tokens.weight", "blocks.0.norm_1.weight", "pooler.weight", "classifier.bias", "pos_embed", "head.weight"]
BEGIN = """
import hashlib, json, sys
from tokendrop.errors import UserError
from tokendrop.train.initial import find_initial

told = {}
for place, kind in json.loads(sys.argv[1]).items():
    try:
        source = find_initial(place, kind)
        weights = source.weights(json.loads(sys.argv[2]))
        told[place] = [source.place, source.tokenizer and open(source.tokenizer).read(), dict(source.sizes)]
        told[place].append({name: float(one.double().sum()) for name, one in weights.items()})
    except UserError as error:
        told[place] = str(error)
print(json.dumps(told))
"""
"""What a job does as it begins, in a process that has not asked the hub before."""


def begun(places: dict[str, str], cache: Path, endpoint: str) -> dict[str, Any]:
    """What a new process finds behind names."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "HF_HOME": str(cache), "HF_ENDPOINT": endpoint}
    environment = {key: value for key, value in environment.items() if not key.endswith("_OFFLINE")}
    command = [sys.executable, "-c", BEGIN, json.dumps(places), json.dumps(NAMES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repositories."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(5)
    gpt2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=50)
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "owner" / "gpt2")
    BertForPreTraining(BertConfig(**BERT)).save_pretrained(folder / "owner" / "bert")
    (folder / "owner" / "bert" / "vocab.txt").write_text("[PAD]\n")
    BertForSequenceClassification(BertConfig(**{**BERT, "num_labels": 3})).save_pretrained(
        folder / "owner" / "classifier"
    )
    (folder / "owner" / "classifier" / "tokenizer.json").write_text("{}")
    for name in ("vit", "no-weights-vit"):
        vit: Any = timm.create_model("vit_base_patch16_224", **VIT)
        save_for_hf(vit, str(folder / "owner" / name), model_args=VIT, safe_serialization=True)
    BertForPreTraining(BertConfig(**BERT)).save_pretrained(folder / "owner" / "no-weights")
    for name in ("no-weights", "no-weights-vit"):
        (folder / "owner" / name / "model.safetensors").unlink()
    (folder / "owner" / "empty").mkdir()
    return folder


@pytest.mark.long
def test_models_of_the_hub_are_found_and_then_without_it(models: Path, tmp_path: Path) -> None:
    with hub(models) as endpoint:
        found = begun({**KINDS, **{place: kind for place, (kind, _) in MISTAKES.items()}}, tmp_path / "cache", endpoint)
    for place, kind in KINDS.items():
        assert not isinstance(found[place], str), found[place]
        named, _, sizes, weights = found[place]
        assert (named, sizes["kind"], sizes["layers"], sizes["width"]) == (place, kind, 2, 16)
        assert len(weights) >= 2
    assert [found[place][1] for place in KINDS] == [None, "[PAD]\n", "{}", None]
    assert found["owner/classifier"][2]["classes"] == found["owner/vit"][2]["classes"] == 3
    for place, (_, said) in MISTAKES.items():
        assert re.fullmatch(rf"model\.init_from: {place}: {said}", found[place]), found[place]

    assert begun(KINDS, tmp_path / "cache", endpoint) == {place: found[place] for place in KINDS}
    without = begun(NOT_CACHED, tmp_path / "cache", endpoint)
    for place in NOT_CACHED:
        assert re.match(rf"model\.init_from: {place}: want a run, a checkpoint, or a ", without[place]), without[place]
