"""lm-eval's tasks on a language model of ours."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from math import isfinite
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from tqdm import tqdm

from tokendrop.data.tokenizer import END_OF_TEXT, end_of_text
from tokendrop.errors import UserError
from tokendrop.evaluate.scoring import BATCH_TOKENS, LanguageModel, score_continuations, write_greedily
from tokendrop.evaluate.tasks import Evaluation, find_tasks

Samples = Mapping[str, Sequence[Mapping[str, Any]]]
"""By task: each request, and what came of it."""

_BOOTSTRAP_DRAWS = 1000  # for the standard errors that have no closed form


class LmEvalAdapter(TemplateLM):
    """A language model as lm-eval wants it; token dropping is off.

    In float64 its log-likelihoods are those of lm-eval's own adapter on the exported folder, to 1e-6 nats, as long as
    that has `logits_cache=False`: its cache, on by default, scores a window by another one's tokens where both have the
    same input and unequal numbers of tokens to score (lm-eval 0.4.13).
    """

    batch_size = 1  # lm-eval reports it; batches here are filled by tokens

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, batch_tokens: int = BATCH_TOKENS) -> None:
        """
        Args:
            batch_tokens: of one forward pass, padding included.
        """
        super().__init__()
        self._model, self._bpe, self._batch_tokens = model.eval(), tokenizer, batch_tokens
        self._device = model.device
        self.max_length = model.sequence_length
        # of tasks that do not say: as lm-eval's Hugging Face adapter, and no more than half of a short model
        self.max_gen_toks = min(256, self.max_length // 2)

    @property
    def eot_token_id(self) -> int:
        return end_of_text(self._bpe)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._bpe.encode(string, add_special_tokens=False).ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._bpe.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval's, with its bars on terminals alone."""
        return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-likelihood, nats, and whether greedy decoding would write it.

        Raises:
            UserError: a continuation has no token of its own, or more than the model takes; or a context has none.
        """
        for (context, continuation), before, tokens in requests:
            if not before:  # lm-eval takes white space at its end for the continuation's
                raise UserError(
                    f"task: want a context of at least one token, or none at all, found {context[-40:]!r}"
                    f" before {continuation[:40]!r}"
                )
            if not 0 < len(tokens) <= self.max_length:
                raise UserError(
                    f"task: want choices of 1 to {self.max_length} tokens, found one of {len(tokens)}:"
                    f" {continuation[:40]!r} after {context[-40:]!r}"
                )
        pairs = [(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=disable_tqdm or None) as bar:
            return score_continuations(self._model, pairs, bar.update, self._batch_tokens)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Each text's log-likelihood, nats; each token scored once, in windows as long as the model takes."""
        owners, windows = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                owners.append(number)
                windows.append((("", text), *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (logprob, _) in zip(owners, scores, strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What greedy decoding writes after each context, up to the first of the task's stop sequences.

        Raises:
            UserError: a task wants samples, or more tokens than the model takes.
        """
        contexts, stops, limits = [], [], []
        for request in requests:
            context, settings = cast(tuple[str, dict[str, Any]], request.args)
            until, limit = self._generation_settings(settings)
            limits.append(limit)
            stops.append(handle_stop_sequences(until, eos=END_OF_TEXT))
            tokens = self.tok_encode(context) or [self.eot_token_id]
            contexts.append(tuple(tokens[-(self.max_length - limit) :]))

        def is_done(number: int, written: tuple[int, ...]) -> bool:
            if written[-1] == self.eot_token_id:
                return True
            text = self.tok_decode(written)
            return any(stop in text for stop in stops[number] if stop)

        with tqdm(total=len(contexts), desc="generations", disable=disable_tqdm or None) as bar:
            written = write_greedily(self._model, contexts, limits, is_done, bar.update, self._batch_tokens)
        texts = map(self.tok_decode, written)
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]

    def _generation_settings(self, settings: Mapping[str, Any]) -> tuple[list[str], int]:
        """A task's stop sequences, and how many tokens it wants at most."""
        normal = cast(dict[str, Any], normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        limit = normal["max_gen_toks"]
        if normal["do_sample"]:
            raise UserError("task: generation_kwargs: want do_sample: false, decoding is greedy here")
        if not 0 < limit < self.max_length:
            raise UserError(
                f"task: generation_kwargs: max_gen_toks={limit} leaves no room for a context;"
                f" this model takes {self.max_length} tokens"
            )
        return normal["until"], limit


def run_tasks(model: LanguageModel, tokenizer: Tokenizer, evaluation: Evaluation) -> tuple[dict[str, Any], Samples]:
    """Run lm-eval's tasks on a model, with no token dropped.

    Returns:
        `results` by task and metric, `versions` and `n_samples` by task, plain JSON; and the samples, where they are
        logged.
    Raises:
        UserError: there is no such task or task data, or a task does not fit the model.
    """
    limit, size = evaluation.limit, evaluation.batch_size
    if limit is not None and limit < 1:
        raise UserError(f"limit: want at least 1 document of each task, got {limit}")
    batch_tokens = BATCH_TOKENS if size is None else size * model.sequence_length
    # each draw of a forked pool would copy this process, model and all
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with redirect_stdout(sys.stderr):
        manager, specs = find_tasks(evaluation.all_tasks, evaluation.include, evaluation.task_data)
        found = simple_evaluate(
            model=LmEvalAdapter(model, tokenizer, batch_tokens=batch_tokens),
            tasks=list(specs),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            log_samples=evaluation.log_samples,
        )
    assert found is not None  # it is on processes of another rank only
    found = cast(dict[str, Any], found)
    return {
        "results": {task: plain_metrics(metrics) for task, metrics in found["results"].items()},
        "versions": dict(found["versions"]),
        "n_samples": {task: counts["effective"] for task, counts in found["n-samples"].items()},
    }, found.get("samples", {})


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """A task's numbers by metric, None for what is not finite, which JSON can't say.

    lm-eval's `acc,none` is `acc` here, and `acc,strict` is `acc.strict`.
    """
    return {
        name.removesuffix(",none").replace(",", "."): float(value) if isfinite(value) else None
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float)
    }
