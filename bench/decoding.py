"""`lingpt bench decode`: each attention's time per token and size of the state, over the context length.

It times what `lingpt generate` does for each new token: a step of the model with its decoding state, and the
sampling of the token, which synchronises with the device. The step is the replay of a CUDA graph; on a CPU,
or on request, it is eager. Weights are random.

Notable:
- no prompt of the context's length is processed. A KV cache is filled with random numbers; the state of a
  linear attention has the same size after one token as at any context, so one token suffices. Neither the
  time per token nor the size of a state depends on the values
- the timed tokens are the last ones of the context, so the state is full when its bytes are counted
- CUDA graphs are captured before the first of them
- an export decodes by transformers' `generate`, on request: the same network as `lingpt.hf` has it, a prompt
  that is read before, eager steps, the draw and whatever else that function does for a token
- one model is in memory at a time
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lingpt.bench.decoding_results import DecodeResults, DecodeRow
from lingpt.bench.environment import warn_if_shared
from lingpt.bench.results import Session
from lingpt.bench.step_results import SHORT_CONV
from lingpt.common.devices import decoding_dtype, find_device
from lingpt.common.errors import check_known
from lingpt.models import GPT, MODELS, Config, DecodingState, ModelArgs, attention_form
from lingpt.models.attention.softmax import KVCache
from lingpt.models.decoding_graph import DecodingGraph
from lingpt.models.generate import sample

FORMS = ("softmax", "hybrid", SHORT_CONV, "ours", "gla")
CONTEXTS, BATCH_SIZES = (2048, 8192, 32768, 131072), (1, 16)
TEMPERATURE, TOP_K = 0.8, 50  # the defaults of `lingpt generate`
# Warm-up and timed tokens are at most half of the context; timing stops after MAX_SECONDS.
WARMUP_TOKENS, TIMED_TOKENS, DRAWS, MAX_SECONDS = 8, 64, 10, 3.0


class Decoder:
    """A model with random weights, built on first use, as building it may run out of memory, too."""

    def __init__(self, config: Config, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    @functools.cached_property
    def model(self) -> GPT:
        model = GPT.on_meta(self.config).to(self.dtype).to_empty(device=self.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        return model.eval()

    def state_after(self, tokens: int, batch_size: int, max_seq_len: int) -> DecodingState:
        """A decoding state as after `tokens` (at least one) tokens, although only one was processed."""
        state = self.model.new_state(batch_size, max_seq_len)
        self.model.step(torch.zeros(batch_size, 1, dtype=torch.long, device=self.device), state)
        for layer in state.layers:
            if isinstance(layer, KVCache):
                layer.fill(tokens)
        state.position = tokens
        return state


def bench_decoding(
    model: str,
    attentions: Sequence[str] = (),
    contexts: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    *,
    dtype: str | None = None,
    device: str = "auto",
    graph: bool = True,
    transformers: bool = False,
    budget: float = 150.0,
    save_to: Path | None = None,
    append: bool = False,
) -> DecodeResults:
    """Measures the time per token and the bytes of the state of each attention, context and batch size.

    Args:
        attentions: names or forms, as in a recipe; by default FORMS.
        contexts, batch_sizes: by default CONTEXTS and BATCH_SIZES.
        dtype: by default bf16 on a GPU that has it, else fp32.
        graph: on a GPU, replay a CUDA graph of the step; False for eager steps.
        transformers: by transformers' `generate`, of the model as `lingpt.hf` has it.
        budget: seconds; once it is spent, no further measurement begins, and the rest is "skipped".
        save_to: a JSON file, written after every row.
        append: keep the results in `save_to`, if they are of this card, these versions and this code, and
            measure what is missing.

    Raises UserError for invalid names and numbers.
    """
    contexts, batch_sizes = contexts or CONTEXTS, batch_sizes or BATCH_SIZES
    configs = choose_configs(model, attentions, max(contexts))
    where = find_device(device)
    warn_if_shared(where)
    kind = decoding_dtype(dtype, where) or torch.float32
    results = DecodeResults.begin(where, str(kind).removeprefix("torch."), save_to, append)
    session = Session(results, where, budget, save_to)
    for form, config in configs.items():
        decoder = Decoder(config, kind, where)
        for batch_size, context in itertools.product(batch_sizes, contexts):
            replayed = graph and where.type == "cuda" and not transformers
            row = DecodeRow(model, form, batch_size, context, replayed, transformers)
            if results.is_done(*row.cell):
                continue
            function = measure_export if transformers else measure
            if session.turn(row, functools.partial(function, decoder=decoder)):
                print(row.line(), flush=True)
    return results


def choose_configs(model: str, attentions: Sequence[str], block_size: int) -> dict[str, Config]:
    """Form (as named in tables) → the model's configuration with it; UserError for unknown names."""
    check_known("model", [model], MODELS)
    configs = {}
    for attention in attentions or FORMS:
        args = ModelArgs(name=model, attention=attention, block_size=block_size)
        configs[attention_form(args.attention, vars(args)).replace(" ", "")] = args.config()
    return configs


@torch.no_grad()
def measure(row: DecodeRow, decoder: Decoder) -> None:
    """Fills in the row's times and bytes."""
    device, cuda = decoder.device, decoder.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    tokens = _tokens(row)
    state = decoder.state_after(row.context - tokens, row.batch_size, row.context)
    step: Callable[[torch.Tensor], torch.Tensor] = functools.partial(decoder.model.next_logits, state=state)
    if row.graph:
        step = graph = DecodingGraph(decoder.model, state)
        graph.prepare(row.context)
    idx_B1 = torch.zeros(row.batch_size, 1, dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(0)

    def token() -> None:
        nonlocal idx_B1
        idx_B1 = sample(step(idx_B1), TEMPERATURE, TOP_K, generator).to(device)

    warmup = min(WARMUP_TOKENS, tokens // 2)
    _times(token, warmup)
    spans = _times(token, tokens - warmup)
    logits_BV = torch.randn(row.batch_size, decoder.config.padded_vocab_size, device=device).to(decoder.dtype)
    draws = _times(lambda: sample(logits_BV, TEMPERATURE, TOP_K, generator), DRAWS)
    row.ms, row.fastest_ms, row.draw_ms = statistics.median(spans), min(spans), statistics.median(draws)
    row.tokens, row.state_bytes = len(spans), state.num_bytes() // row.batch_size
    row.peak_memory = torch.cuda.max_memory_allocated(device) if cuda else None


@torch.no_grad()
def measure_export(row: DecodeRow, decoder: Decoder) -> None:
    """Fills in the row's times, the state's bytes and the memory of transformers' `generate`."""
    from lingpt.hf import LinGPTCache, LinGPTConfig, LinGPTForCausalLM

    with torch.device(decoder.device):
        model = LinGPTForCausalLM(LinGPTConfig(decoder.config.to_dict())).to(decoder.dtype).eval()
    if cuda := decoder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(decoder.device)
    tokens, times = _tokens(row), list[float]()

    def note_time(idx_BN: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        idx_BN[-1, -1].item()  # the token is there
        times.append(time.perf_counter())
        return torch.zeros(len(idx_BN), dtype=torch.bool, device=idx_BN.device)

    prompt_BN = torch.randint(
        decoder.config.vocab_size, (row.batch_size, row.context - tokens), device=decoder.device
    )
    output = model.generate(
        prompt_BN, attention_mask=torch.ones_like(prompt_BN), max_new_tokens=tokens, do_sample=True,
        temperature=TEMPERATURE, top_k=TOP_K, stopping_criteria=[note_time], return_dict_in_generate=True,
    )  # fmt: skip
    spans = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    spans = spans[min(WARMUP_TOKENS, tokens // 2) - 1 :]
    cache = next(value for value in output.values() if isinstance(value, LinGPTCache))
    row.ms, row.fastest_ms, row.tokens = statistics.median(spans), min(spans), len(spans)
    row.state_bytes = cache.num_bytes() // row.batch_size
    row.peak_memory = torch.cuda.max_memory_allocated(decoder.device) if cuda else None


def _tokens(row: DecodeRow) -> int:
    """Warm-up and timed tokens: the last ones of the context."""
    return min(WARMUP_TOKENS + TIMED_TOKENS, row.context // 2)


def _times(work: Callable[[], object], most: int) -> list[float]:
    """Milliseconds of each of up to `most` runs, until MAX_SECONDS, of work whose result is on the CPU."""
    spans: list[float] = []
    while len(spans) < most and sum(spans) < 1e3 * MAX_SECONDS:
        began = time.perf_counter()
        work()
        spans.append(1e3 * (time.perf_counter() - began))
    return spans
