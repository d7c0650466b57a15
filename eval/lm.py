"""lm-eval's `LM` over our `GPT`: scores and generates text in batches of similar length.

Text becomes tokens exactly as in lm-eval's own Hugging Face adapter (`lm_eval.models.huggingface.HFLM`), so
the log-likelihoods equal its own on the same weights (`tests/eval/test_lm.py`), but for one thing: no begin
of text precedes a text, which HFLM adds where the tokenizer asks for it, as Llama's. The computation differs:

- Requests that feed the model the same tokens share a row: the four one-letter answers of an MMLU question
  cost one forward pass.
- Rows are sorted by length and cut into batches of at most `batch_tokens` tokens, padding included. Padding
  is on the right, where causal attention cannot see it, so a score does not depend on its batch.
- Only the scored positions go through `lm_head`, which is most of a small model at 50,304 tokens.
"""

import contextlib
import queue
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.data import Tokenizer
from lingpt.models import GPT, Config
from lingpt.models.checkpoint import model_from_tensors

# (context tokens, tokens to score after it)
Pair = tuple[list[int], list[int]]
# model input → the (index of the pair, tokens to predict at the input's end) that it serves
Rows = dict[tuple[int, ...], list[tuple[int, list[int]]]]
# what `LinGPTLM._score_batch` returns
Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]

PAIRS_AT_ONCE = 4096  # texts tokenised at once: enough to keep every core busy
LOGITS_AT_ONCE = 2048  # rows of [vocabulary] held in fp32: 0.4 GB at Pythia's vocabulary
MAX_NEW_TOKENS = 256  # lm-eval's default if a task does not say


class LinGPTLM(TemplateLM):
    """Scores and generates text with a `GPT`, in the dtype and on the device its weights are in.

    Args:
        model: a `lingpt.models.GPT`, which is put into eval mode; or the same model on several devices, which
            share the batches. The batches, and so the scores, do not depend on the number of devices.
        tokenizer: its `lingpt.data.Tokenizer`.
        batch_tokens: most tokens of a batch, padding included (a longer sequence is a batch of its own).

    Attributes:
        max_length: most tokens of context: the model's block size.
        cut_prompts: distinct contexts so far that were cut on the left to fit `max_length`.
    """

    def __init__(
        self,
        model: GPT | Sequence[GPT],
        tokenizer: Tokenizer,
        *,
        batch_tokens: int = 16384,
        name: str = "the model",
    ) -> None:
        super().__init__()
        self.models = [one.eval() for one in ([model] if isinstance(model, GPT) else model)]
        self.model = model = self.models[0]
        self.text_tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.max_length = model.config.block_size
        self.name, self.cut_prompts = name, 0
        weight = model.lm_head.weight
        self._device, self.dtype = weight.device, weight.dtype

    def reading(self, length: int) -> "LinGPTLM":
        """The same weights, shared, in models with a block size of `length` tokens."""
        models = [same_weights(model, model.lm_head.weight.device, length) for model in self.models]
        return LinGPTLM(models, self.text_tokenizer, batch_tokens=self.batch_tokens, name=self.name)

    # ------------------------------------------------------------------ text ↔ tokens

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text_tokenizer.encode(string)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """lm-eval's `_encode_pair`, and its rule for an empty context, with each text tokenised once.

        Spaces at the end of the context move to the continuation; the two are tokenised together and cut
        where the tokens of the context alone end. An empty context is the end-of-text token.
        """
        encoded = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            split = [_move_spaces(*pair) for pair in pairs[start : start + PAIRS_AT_ONCE]]
            texts = list(dict.fromkeys(text for first, second in split for text in (first, first + second)))
            tokens = dict(zip(texts, self.text_tokenizer.encode_batch(texts), strict=True))
            encoded += [self._cut(pair, tokens) for pair in split]
        return encoded

    def _cut(self, pair: tuple[str, str], tokens: dict[str, list[int]]) -> Pair:
        context, continuation = pair
        whole = tokens[context + continuation]
        if context:
            head, tail = tokens[context], whole[len(tokens[context]) :]
        else:
            whole = whole if whole[:1] == [self.prefix_token_id] else [self.prefix_token_id, *whole]
            head, tail = whole[:1], whole[1:]
        if not tail:
            raise UserError(f"nothing to score: {continuation!r} adds no token after {context[-40:]!r}")
        return head, tail

    # ------------------------------------------------------------------ scoring

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """`(log P(continuation | context), whether greedy decoding gives it)` for each request."""
        pairs = self.encode_pairs([request.args for request in requests])
        return self.score(pairs, disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        return self.score([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log P of each whole text, in disjoint windows of `max_length`; end-of-text precedes the first."""
        texts = self.text_tokenizer.encode_batch([request.args[0] for request in requests])
        return self.rolling(texts, disable_tqdm)

    def rolling(self, texts: Sequence[list[int]], disable_tqdm: bool = False) -> list[float]:
        """`loglikelihood_rolling` of tokenised texts."""
        windows: list[Pair] = []
        owner: list[int] = []
        for i, tokens in enumerate(texts):
            pieces = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [make_disjoint_window(piece) for piece in pieces]
            owner += [i] * (len(windows) - len(owner))
        totals = [0.0] * len(texts)
        for i, (logprob, _) in zip(owner, self.score(windows, disable_tqdm), strict=True):
            totals[i] += logprob
        return totals

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Each continuation's sum of log-probabilities, and whether each of its tokens is the arg-max."""
        rows = self._rows(pairs)
        logprob = torch.zeros(len(pairs), dtype=torch.float64)
        greedy = torch.ones(len(pairs), dtype=torch.bool)
        with self._bar(len(pairs), disable_tqdm, "log-likelihoods") as bar:
            for owner, per_token, is_best, served in self._shared(rows):
                logprob.index_add_(0, owner, per_token)
                greedy[owner[~is_best]] = False
                bar.update(served)
        return list(zip(logprob.tolist(), greedy.tolist(), strict=True))

    @torch.inference_mode()
    def token_losses(self, texts: Sequence[list[int]]) -> list[torch.Tensor]:
        """−log p of each token of a text but the first, given those before it: nats, float64 `[tokens − 1]`.

        texts: each of 2 to `max_length + 1` tokens, with nothing before its first one.
        """
        rows = self._rows([(tokens[:1], tokens[1:]) for tokens in texts])
        losses = [torch.empty(0)] * len(texts)
        with self._bar(len(texts), False, "losses") as bar:
            for owner, per_token, _, served in self._shared(rows):
                numbers, counts = owner.unique_consecutive(return_counts=True)
                for i, part in zip(numbers.tolist(), per_token.split(counts.tolist()), strict=True):
                    losses[i] = -part
                bar.update(served)
        return losses

    def _shared(self, rows: Rows) -> Iterator[Scored]:
        """The scores of all rows, the longest first; each batch goes to an idle model."""
        batches = _batches(sorted(rows, key=lambda row: (-len(row), row)), self.batch_tokens)
        idle: queue.SimpleQueue[GPT] = queue.SimpleQueue()
        for model in self.models:
            idle.put(model)

        def score(batch: list[tuple[int, ...]]) -> Scored:
            model = idle.get()
            try:
                return self._score_batch(model, batch, rows)
            finally:
                idle.put(model)

        if len(self.models) == 1:
            yield from map(score, batches)
            return
        with ThreadPoolExecutor(len(self.models)) as threads:
            yield from threads.map(score, batches)

    def _rows(self, pairs: Sequence[Pair]) -> Rows:
        """Distinct model inputs, each with the `(index of the pair, tokens to predict at its end)` it serves.

        The input is cut on the left to `max_length`; a continuation longer than that is scored in pieces,
        each after as much of what precedes it as fits.
        """
        rows = defaultdict(list)
        cut: set[tuple[int, ...]] = set()
        for i, (context, continuation) in enumerate(pairs):
            if len(context) + len(continuation) > self.max_length + 1:
                cut.add(tuple(context))
            for start in range(0, len(continuation), self.max_length):
                piece = continuation[start : start + self.max_length]
                seen = (context + continuation[: start + len(piece)])[-(self.max_length + 1) : -1]
                rows[tuple(seen)].append((i, piece))
        self.cut_prompts += len(cut)
        return rows

    @torch.inference_mode()  # again: the mode is per thread
    def _score_batch(self, model: GPT, batch: list[tuple[int, ...]], rows: Rows) -> Scored:
        """For every scored token: the index of its pair, its log-probability, whether it is the arg-max. Then
        the number of pairs scored."""
        device = model.lm_head.weight.device
        length = len(batch[0])  # the longest: rows come sorted
        owners: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        for b, row in enumerate(batch):
            for i, tokens in rows[row]:
                end = b * length + len(row)
                owners += [i] * len(tokens)
                positions += range(end - len(tokens), end)
                targets += tokens
        idx = torch.tensor([row + (0,) * (length - len(row)) for row in batch])
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                hidden = model.hidden(idx.to(device)).flatten(0, 1)[torch.tensor(positions).to(device)]
                logprob, best = token_scores(model, hidden, torch.tensor(targets).to(device))
                logprob, best = self.finite(logprob.cpu()), best.cpu()
        except torch.OutOfMemoryError as error:
            mend = "--batch_tokens" if len(batch) > 1 else "--max_length_factor"
            raise UserError(f"out of memory with a batch of {idx.numel():,} tokens: lower {mend}") from error
        return torch.tensor(owners), logprob.double(), best, sum(len(rows[row]) for row in batch)

    def finite(self, logprob: torch.Tensor) -> torch.Tensor:
        """`logprob`; UserError if one is not finite, as accuracies would hide it."""
        if not logprob.isfinite().all():
            raise UserError(
                f"{self.name}: a log-likelihood is not finite: the weights are damaged, or diverged"
            )
        return logprob

    # ------------------------------------------------------------------ generation

    @torch.inference_mode()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text after each context, up to a stop sequence, end-of-text or `max_gen_toks`.

        A batch has contexts of similar lengths, padded on the left.
        """
        texts = self.text_tokenizer.encode_batch([request.args[0] for request in requests])
        # Options of generation → context → its requests.
        groups = defaultdict[tuple, dict[tuple[int, ...], list[int]]](lambda: defaultdict(list))
        for i, (request, tokens) in enumerate(zip(requests, texts, strict=True)):
            until, new = self._generation_options(request.args[1])
            self.cut_prompts += len(tokens) > self.max_length - new
            tokens = (tokens or [self.prefix_token_id])[-(self.max_length - new) :]
            groups[new, until][tuple(tokens)].append(i)
        answers = [""] * len(requests)
        with self._bar(len(requests), disable_tqdm, "generations") as bar:
            for (new, until), asked in groups.items():
                for contexts in _batches(sorted(asked, key=len, reverse=True), self.batch_tokens, new):
                    for context, answer in zip(contexts, self._generate(contexts, new, until), strict=True):
                        for i in asked[context]:
                            answers[i] = answer
                        bar.update(len(asked[context]))
        return answers

    def _generation_options(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Stop sequences and the number of new tokens; UserError for sampling, which is not supported."""
        options = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
        if options["do_sample"]:
            raise UserError(
                "this task asks for sampled text (do_sample); only greedy generation is supported"
            )
        new = options["max_gen_toks"]
        if new >= self.max_length:
            raise UserError(
                f"{new} new tokens leave no room for a context: the model's block size is {self.max_length}"
            )
        eos = self.text_tokenizer.decode([self.eot_token_id])
        return tuple(handle_stop_sequences(options.get("until"), eos)), new

    def _generate(self, contexts: Sequence[tuple[int, ...]], max_new: int, until: Sequence[str]) -> list[str]:
        """Greedy continuations, cut before the first stop sequence (end-of-text is one)."""
        length, cu_seqlens = max(map(len, contexts)), None
        padding = [length - len(context) for context in contexts]
        rows = [(0,) * n + context for n, context in zip(padding, contexts, strict=True)]
        idx = torch.tensor(rows, device=self.device)
        if any(padding):  # each row is two documents, the first of them padding
            begins = [b * length + offset for b, n in enumerate(padding) for offset in (0, n)]
            cu_seqlens = torch.tensor([*begins, idx.numel()], dtype=torch.int32, device=self.device)
        state = self.model.new_state(len(idx), idx.shape[1] + max_new, device=self.device, dtype=self.dtype)
        tokens, texts = [list[int]() for _ in contexts], [""] * len(contexts)
        ended = [False] * len(contexts)
        for _ in range(max_new):
            last = self.model.hidden(idx, state, cu_seqlens)[:, -1]  # enough of a prompt
            cu_seqlens = None  # of the prompts alone
            logits = self.model.lm_head(last)[:, : self.text_tokenizer.vocab_size]  # without rows of padding
            idx = logits.argmax(-1, keepdim=True)
            for b, token in enumerate(idx[:, 0].tolist()):
                if not ended[b]:
                    tokens[b].append(token)
                    texts[b] = self.text_tokenizer.decode(tokens[b])
                    ended[b] = any(stop and stop in texts[b] for stop in until)
            if all(ended):
                break
        return [postprocess_generated_text(text, list(until), None) for text in texts]

    def _bar(self, total: int, disable: bool, what: str) -> tqdm:
        return tqdm(total=total, desc=what, unit="", disable=disable or None)


def same_weights(model: GPT, device: torch.device, block_size: int | None = None) -> GPT:
    """A model with the weights of `model`, shared if on the same device. The block size, by default the
    model's, may differ: no weight depends on it."""
    size = {"block_size": block_size or model.config.block_size}
    config = Config.from_dict(model.config.to_dict() | size)
    weights = {name: tensor.to(device) for name, tensor in model.state_dict().items()}
    return model_from_tensors(config, weights, config.name, device)


def token_scores(model: GPT, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden [n, C]`, `target [n]` → log-probabilities `[n]` in fp32 (or wider), whether the arg-max `[n]`.

    Computed in pieces: the logits of all n would be the largest tensor by far.
    """
    parts = []
    for h, t in zip(hidden.split(LOGITS_AT_ONCE), target.split(LOGITS_AT_ONCE), strict=True):
        logits = model.lm_head(h)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        parts.append((logits.gather(-1, t[:, None])[:, 0] - logits.logsumexp(-1), logits.argmax(-1) == t))
    logprob, best = zip(*parts, strict=True)
    return torch.cat(logprob), torch.cat(best)


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Moves whitespace at the context's end to the continuation: tokenizers join a space to what follows."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _batches(
    rows: Iterable[tuple[int, ...]], batch_tokens: int, new_tokens: int = 0
) -> Iterator[list[tuple[int, ...]]]:
    """Splits rows, longest first, into batches of at most `batch_tokens` tokens, padding and `new_tokens` a
    row included."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and (len(batch[0]) + new_tokens) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
