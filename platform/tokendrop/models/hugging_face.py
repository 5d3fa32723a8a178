"""Models of Hugging Face as a source of weights for ours: a folder, or a name on the hub."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForPreTraining
from transformers.utils import cached_file, logging
from transformers.utils.hub import resolve_revision

from tokendrop.errors import UserError, first_line
from tokendrop.models import pretrained, pretrained_bert

_FAMILIES = {"gpt2": pretrained, "bert": pretrained_bert, "megatron-bert": pretrained_bert}
_LABELS, _CHOICES = "ForSequenceClassification", "ForMultipleChoice"
"""How names of classes end whose heads classify."""


class HuggingFaceWeights:
    """Weights under the names of ours."""

    def __init__(self, place: str) -> None:
        """
        Raises:
            UserError: there is no model, or none of a kind that we have.
        """
        self.place = place
        # one commit for all files, by which the cache knows those that are not there too, and asks no hub that is away
        self._revision = resolve_revision(place)
        try:
            self.config: Any = AutoConfig.from_pretrained(place, revision=self._revision)
        except Exception as error:  # of the network, of a file, or of the library
            raise UserError(
                f"model.init_from: {place}: want a run, a checkpoint, or a model of Hugging Face as a folder or by its"
                f" name on the hub ({first_line(error)[:200]})"
            ) from None
        if self.config.model_type not in _FAMILIES:
            raise UserError(
                f"model.init_from: {place} is of the type {self.config.model_type}; want {', '.join(_FAMILIES)}"
            )
        self._family = _FAMILIES[self.config.model_type]

    @property
    def tokenizer(self) -> str | None:
        """The path of its `tokenizer.json`, or its `vocab.txt`; None where it has none.

        Raises:
            UserError: the settings of its tokenizer can't be read.
        """
        if path := self._file("tokenizer.json"):
            return path
        settings = self._file("tokenizer_config.json")
        try:
            is_cased = settings is not None and json.loads(Path(settings).read_text()).get("do_lower_case") is False
        except (ValueError, AttributeError) as error:
            raise UserError(f"model.init_from: {settings}: want a JSON object ({first_line(error)})") from None
        # of a vocab.txt alone comes a tokenizer that makes lower case
        return None if is_cased else self._file("vocab.txt")

    def _file(self, name: str) -> str | None:
        with suppress(OSError):
            return cached_file(self.place, name, revision=self._revision)
        return None

    @property
    def sizes(self) -> dict[str, Any]:
        """Keys of `model` in a job, and their values there; of one that classifies `classes` too.

        Raises:
            UserError: the model has something that ours have not.
        """
        heads = {_LABELS: self.config.num_labels, _CHOICES: 1}
        classes = next((heads[name] for one in self._architectures for name in heads if one.endswith(name)), None)
        try:
            return self._family.sizes_of(self.config) | ({} if classes is None else {"classes": classes})
        except ValueError as error:
            raise UserError(f"model.init_from: {self.place}: {error}") from None

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of our parameters that the model has, by name.

        Raises:
            UserError: its files can't be read as those of such a model.
        """
        before = logging.get_verbosity()
        logging.set_verbosity_error()  # heads that are not there are told of with a table
        try:
            model, told = self._class().from_pretrained(
                self.place, revision=self._revision, dtype="auto", output_loading_info=True
            )
        except Exception as error:  # of a file, or of the library
            if not Path(self.place).is_dir() and not _is_told_of_files(error):
                raise  # of the network, which another attempt may reach
            said = first_line(error)
            raise UserError(f"model.init_from: {self.place}: want the weights of a model, whole ({said})") from None
        finally:
            logging.set_verbosity(before)
        theirs = {name: value for name, value in model.state_dict().items() if name not in told["missing_keys"]}
        return self._family.weights_of(theirs, self.config, names)

    def _class(self) -> Any:
        """That of a classifier, by which it was saved; else the one with the heads of pretraining."""
        for name in self._architectures:
            if name.endswith((_LABELS, _CHOICES)):
                return getattr(transformers, name, AutoModelForPreTraining)
        return AutoModelForPreTraining

    @property
    def _architectures(self) -> list[str]:
        return self.config.architectures or []


def _is_told_of_files(error: Exception) -> bool:
    """Whether transformers itself says that files are missing; what a connection did is the cause of its error."""
    return isinstance(error, OSError) and error.__cause__ is None
