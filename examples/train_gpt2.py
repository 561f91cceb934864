#!/usr/bin/env python3
"""Train a small GPT-2 on the sources of Python's standard library, from the tokenizer to a sample of its text.

The model is a stock one of Transformers; attention, layer norms, MLPs (linear + GELU in one kernel) and the loss run on
FlashKernel's kernels, forward and backward, unless --kernels stock says otherwise. On a GPU a whole step, optimizers
included, is one CUDA graph. The result is a Hugging Face checkpoint folder (GPT2LMHeadModel in fp16), the format that
FlashKernel reads. The default arguments are those of the checkpoint in demo/flashkernel_demo/gpt2-python: minutes
on a data-centre GPU. To try the script on a CPU, in about 20 seconds:

    python examples/train_gpt2.py --quick --out /tmp/gpt2-quick

Everything random (weights, dropout, batches) comes from --seed. On a CPU, two runs with the same arguments, library
versions and number of threads give the same weights, bit for bit. On a GPU some of torch's kernels add in varying
order, so that two runs agree only roughly. Needs flashkernel, torch >= 2.9, transformers, tokenizers and tqdm.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import platform
import sys
import sysconfig
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

import flashkernel.torch as fkt
from flashkernel.integrations.transformers import accelerated, attention_forward

# Windows are full, so causal attention needs no mask. For names that have no mask function Transformers makes none; for
# its own it makes one wherever it can't look at the batch, as under torch.compile and while a graph is captured.
ATTENTION = {"stock": "sdpa_without_mask", "flashkernel": "fkernel_without_mask"}
AttentionInterface.register(ATTENTION["stock"], sdpa_attention_forward)
AttentionInterface.register(ATTENTION["flashkernel"], attention_forward)

EOS = "<|endoftext|>"
TEST_DIRS = {"test", "tests", "idle_test"}
# Installed packages, leftovers of the build, and generated tables that are not worth learning.
SKIP_DIRS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
SKIP_PREFIXES = ("config-", "_sysconfigdata")

# What --quick puts in place of the defaults.
QUICK_MODEL = {"vocab_size": 512, "context": 128, "n_layer": 2, "n_embd": 64, "n_head": 2, "dropout": 0.0}
QUICK_RUN = {"max_files": 60, "batch_size": 8, "steps": 200, "warmup": 20, "eval_interval": 50, "max_new_tokens": 40}


@dataclass
class Corpus:
    """One side of the train/validation split, as a single stream of token ids."""

    tokens: torch.Tensor  # int64; files are joined by the end-of-text token
    num_files: int
    num_bytes: int


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT-2 on the sources of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument
    stdlib = Path(sysconfig.get_path("stdlib"))
    add("--out", type=Path, default=Path("gpt2-python"), help="folder for the checkpoint")
    add("--source", type=Path, default=stdlib, help="folder searched for .py files: this Python's standard library")
    add("--include-tests", action=toggle, default=True, help="train on the test suites inside the source folder too")
    add("--max-files", type=int, help="use at most this many files, evenly spread over the list")
    add("--tokenizer", type=Path, help="tokenizer.json to take instead of training one")
    add("--quick", action="store_true", help="tiny model, few files and steps: seconds on a CPU")
    add("--seed", type=int, default=1337, help="seed of weights, dropout and batches")

    add = parser.add_argument_group("model").add_argument
    add("--vocab-size", type=int, default=2816, help="size of the byte-level BPE vocabulary")
    add("--context", type=int, default=1024, help="context length (n_positions)")
    add("--n-layer", type=int, default=7, help="number of transformer blocks")
    add("--n-embd", type=int, default=192, help="width of the residual stream")
    add("--n-head", type=int, default=6, help="number of attention heads")
    add("--dropout", type=float, default=0.1, help="dropout on embeddings and residual branches")

    add = parser.add_argument_group("optimization").add_argument
    add("--steps", type=int, default=12462, help="optimizer steps")
    add("--batch-size", type=int, default=32, help="sequences of one context length per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate; cosine decay to zero")
    add("--warmup", type=int, default=300, help="steps of linear warm-up")
    add("--weight-decay", type=float, default=0.1, help="decoupled weight decay of weight matrices and embeddings")
    add("--grad-clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--eval-interval", type=int, default=1000, help="steps from one evaluation to the next; the best one is kept")
    add("--max-seconds", type=float, help="after the warm-up, as few steps as this much time for everything allows")

    add = parser.add_argument_group("execution").add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--kernels", choices=("flashkernel", "stock"), default="flashkernel", help="whose kernels the model runs on")
    add("--bf16", action=toggle, help="bf16 autocast; if not given, on a GPU only")
    add("--compile", action=toggle, help="torch.compile the model; if not given, on a GPU only")
    add("--graph", action=toggle, help="a step as one CUDA graph; if not given, on a GPU only")
    add("--prompt", default="def fibonacci(n):\n", help="prompt of the sample printed at the end")
    add("--max-new-tokens", type=int, default=120, help="length of that sample")

    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(**QUICK_MODEL, **QUICK_RUN)  # options on the command line still win
    args = parser.parse_args(argv)
    on_gpu = torch.device(args.device).type != "cpu"
    args.bf16 = on_gpu if args.bf16 is None else args.bf16
    args.compile = on_gpu if args.compile is None else args.compile
    args.graph = on_gpu if args.graph is None else args.graph
    return args


def find_sources(root: Path, include_tests: bool = True, max_files: int | None = None) -> list[Path]:
    """The Python files under `root`, in an order that does not depend on the file system."""
    skip = SKIP_DIRS if include_tests else SKIP_DIRS | TEST_DIRS

    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return skip.isdisjoint(parts[:-1]) and not any(part.startswith(SKIP_PREFIXES) for part in parts)

    files = sorted(filter(wanted, root.rglob("*.py")), key=lambda path: path.relative_to(root).as_posix())
    if max_files is not None and len(files) > max_files:
        files = [files[i * len(files) // max_files] for i in range(max_files)]
    return files


def read_source(path: Path) -> str | None:
    """The text of a source file, or None if it does not decode (some files of the test suite are broken on purpose)."""
    try:
        with tokenize.open(path) as file:  # honours the coding cookie
            return file.read()
    except (SyntaxError, UnicodeError):
        return None


def split_sources(root: Path, files: list[Path]) -> tuple[list[str], list[str]]:
    """The texts for training and for validation.

    About 5% of the files, chosen by a hash of their relative path, go to validation: the side a file is on depends
    neither on the seed nor on which other files there are, so that the losses of runs can be compared.
    """
    train: list[str] = []
    val: list[str] = []
    for path in files:
        if text := read_source(path):
            held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % 20 == 0
            (val if held_out else train).append(text)
    if not val and len(train) > 1:  # a very small source folder
        val.append(train.pop())
    if not train or not val:
        raise SystemExit(f"{root}: {len(files)} readable .py files; training and validation need at least two")
    return train, val


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's pre-tokenization, which begins each text with the end-of-text token.

    That token tells the model that a prompt is the start of a file, not of a window cut from the middle of one. Merges
    are learned on single lines, so that no token reaches across a newline: under GPT-2's own merges a newline and the
    indentation after it are one token, and a prompt that ends in a newline says that what follows is unindented.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = byte_level  # GPT-2's; with these merges it splits at newlines by itself
    template = {"single": f"{EOS} $A", "special_tokens": [(EOS, tokenizer.token_to_id(EOS))]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Corpus:
    ids = [i for encoding in tokenizer.encode_batch([*texts, ""]) for i in encoding.ids]  # ends in end-of-text too
    return Corpus(torch.tensor(ids), len(texts), sum(len(text.encode()) for text in texts))


def sample_batches(corpus: Corpus, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """One batch of random windows of the token stream per step, cut on the device."""
    tokens = corpus.tokens.to(args.device)
    generator = torch.Generator().manual_seed(args.seed)  # on the CPU: the same windows on every device
    shape = (args.steps, args.batch_size, 1)
    # All starts at once: a copy to the GPU in each step would make the CPU wait for it.
    starts = torch.randint(len(tokens) - args.context + 1, shape, generator=generator).to(args.device)
    window = torch.arange(args.context, device=args.device)
    for step_starts in starts:
        yield tokens[step_starts + window]


def next_token_loss(
    model: GPT2LMHeadModel,
    tokens: torch.Tensor,
    cross_entropy: Callable[..., torch.Tensor] = functional.cross_entropy,
) -> torch.Tensor:
    """Mean cross-entropy, in nats, of each token given those before it."""
    logits = model(input_ids=tokens, use_cache=False).logits
    targets = functional.pad(tokens[:, 1:], (0, 1), value=-100)  # ignored: nothing follows the last token
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, tokens: torch.Tensor, batch_size: int) -> float:
    """The loss over consecutive windows of the token stream."""
    context = min(model.config.n_positions, len(tokens))
    windows = tokens[: len(tokens) // context * context].view(-1, context)
    total = sum(float(next_token_loss(model, batch)) * len(batch) for batch in windows.split(batch_size))
    return total / len(windows)


class Muon:
    """Muon (Jordan, 2024): descent along the momentum with its singular values set to about one.

    As torch.optim.Muon with adjust_lr_fn="match_rms_adamw", which scales steps to the size of AdamW's, so that one
    learning rate serves both; but all matrices of one shape are one batch of products, and nothing waits for the GPU.
    Each matrix comes with the number of blocks of columns that are orthogonalized by themselves.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards one
    ITERATIONS = 5

    def __init__(
        self, matrices: list[tuple[torch.Tensor, int]], lr: torch.Tensor, weight_decay: float, momentum: float = 0.95
    ):
        self.matrices, self.lr, self.weight_decay, self.momentum = matrices, lr, weight_decay, momentum
        self.velocity: dict[tuple[int, ...], torch.Tensor] = {}

    def blocks(self, gradients: bool) -> dict[tuple[int, ...], list[torch.Tensor]]:
        """Views of all blocks, none taller than wide, by shape."""
        found: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for matrix, parts in self.matrices:
            for part in (matrix.grad if gradients else matrix.detach()).chunk(parts, dim=1):
                block = part.t() if part.shape[0] > part.shape[1] else part
                found.setdefault(tuple(block.shape), []).append(block)
        return found

    @torch.no_grad()
    def step(self) -> None:
        gradients = self.blocks(gradients=True)
        for shape, weights in self.blocks(gradients=False).items():
            gradient = torch.stack(gradients[shape])
            if shape not in self.velocity:
                self.velocity[shape] = torch.zeros_like(gradient)
            velocity = self.velocity[shape].lerp_(gradient, 1 - self.momentum)
            update = self.orthogonal(gradient.lerp(velocity, self.momentum)) * (0.2 * math.sqrt(max(shape)) * self.lr)
            torch._foreach_mul_(weights, 1 - self.lr * self.weight_decay)
            torch._foreach_sub_(weights, list(update))

    def orthogonal(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.COEFFICIENTS
        x = x.bfloat16()
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values of one at most
        for _ in range(self.ITERATIONS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x


def learning_rate(step: int, steps: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step <= args.warmup:
        return args.lr * step / args.warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, steps - args.warmup)))


class Graphed:
    """Calls `step` a few times (kernels get compiled, optimizers make their state), then replays a CUDA graph of it."""

    EAGER = 3

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]):
        self.step, self.calls, self.stream = step, 0, torch.cuda.Stream()

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.EAGER:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.calls == self.EAGER + 1:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.step(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss


def make_step(
    model: GPT2LMHeadModel, args: argparse.Namespace, lr: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes one optimizer step on a batch and gives its loss: Muon for the weight matrices of the
    blocks (Q, K and V each for itself), AdamW for embeddings, biases and norms.
    """
    device = torch.device(args.device)
    loss_fn = torch.compile(next_token_loss) if args.compile else next_token_loss
    cross_entropy = fkt.cross_entropy if args.kernels == "flashkernel" else functional.cross_entropy
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]  # wte is the output layer too
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    named = model.transformer.h.named_parameters()
    matrices = [(p, 3 if name.endswith("c_attn.weight") else 1) for name, p in named if p.dim() == 2]
    muon = Muon(matrices, lr, args.weight_decay)
    adamw = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True, capturable=args.graph)

    def step(batch: torch.Tensor) -> torch.Tensor:
        # Each weight is used once a step: there is nothing for autocast's cache to save.
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16, cache_enabled=False):
            loss = loss_fn(model, batch, cross_entropy)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        muon.step()
        adamw.step()
        model.zero_grad()
        return loss.detach()

    return Graphed(step) if args.graph else step


def rounded_to_fp16(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """A copy with its weights rounded to fp16, in fp32."""
    return copy.deepcopy(model).half().float().eval()


def load_data(args: argparse.Namespace) -> tuple[Tokenizer, Corpus, Corpus]:
    """The tokenizer, and both sides of the split."""
    files = find_sources(args.source, args.include_tests, args.max_files)
    train_texts, val_texts = split_sources(args.source, files)
    if args.tokenizer is None:
        tokenizer = train_tokenizer(train_texts, args.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    train, val = encode(tokenizer, train_texts), encode(tokenizer, val_texts)
    for name, side in {"train": train, "val": val}.items():
        print(f"{name}: {side.num_files} files, {side.num_bytes / 1e6:.2f} MB, {len(side.tokens):,} tokens", flush=True)
    if len(train.tokens) < args.context:
        raise SystemExit(f"{args.source}: {len(train.tokens)} tokens; one context needs {args.context}")
    return tokenizer, train, val


def make_model(args: argparse.Namespace, tokenizer: Tokenizer) -> GPT2LMHeadModel:
    """Random weights, by --seed."""
    torch.manual_seed(args.seed)
    eos = tokenizer.token_to_id(EOS)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=args.context,
        n_layer=args.n_layer,
        n_embd=args.n_embd,
        n_head=args.n_head,
        activation_function="gelu_new",
        embd_pdrop=args.dropout,
        resid_pdrop=args.dropout,
        attn_pdrop=0.0,
        bos_token_id=eos,
        eos_token_id=eos,
        tie_word_embeddings=True,
    )
    return GPT2LMHeadModel(config).train().to(device=args.device)


@contextlib.contextmanager
def running_on(kernels: str, model: GPT2LMHeadModel) -> Iterator[None]:
    """Runs the model on the stock kernels, or on FlashKernel's, while the context is open."""
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION[kernels])
    try:
        with accelerated(model, attention=False) if kernels == "flashkernel" else contextlib.nullcontext():
            yield
    finally:
        model.set_attn_implementation(before)


def fit(
    model: GPT2LMHeadModel,
    train: Corpus,
    args: argparse.Namespace,
    after: Callable[[int, int, torch.Tensor], None] = lambda step, steps, losses: None,
    started: float | None = None,
) -> torch.Tensor:
    """Trains and returns the loss of each step. `after` is called after each with its number, the number of steps there
    will be and the losses so far, all on the device.
    """
    started = time.perf_counter() if started is None else started
    device = torch.device(args.device)
    lr = torch.zeros((), device=device)
    step_fn = make_step(model, args, lr)
    losses = torch.zeros(args.steps, device=device)
    steps, begin = args.steps, 0.0
    counted = args.warmup // 2  # the steps of the warm-up's second half are timed
    batches = sample_batches(train, args)
    progress = tqdm(batches, total=args.steps, unit="step", disable=not sys.stderr.isatty())
    for step, batch in enumerate(progress, start=1):
        lr.fill_(learning_rate(step, steps, args))
        losses[step - 1] = step_fn(batch)
        after(step, steps, losses[:step])
        if args.max_seconds and step in (counted, args.warmup):
            float(losses[step - 1])  # waits
            now = time.perf_counter()
            if step == args.warmup and step > counted:
                left = 0.9 * (args.max_seconds - (now - started))  # evaluations take some of it
                steps = min(steps, step + max(1, int(left * (step - counted) / (now - begin))))
            begin = now
        if step == steps:
            break
    return losses[:step]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    started = time.perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)

    tokenizer, train, val = load_data(args)
    eos = tokenizer.token_to_id(EOS)
    special = {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS}
    hf_tokenizer = GPT2TokenizerFast(tokenizer_object=tokenizer, model_max_length=args.context, **special)
    hf_tokenizer.save_pretrained(args.out)
    model = make_model(args, tokenizer)
    print(
        f"model: {model.num_parameters() / 1e6:.2f} M parameters, on {args.device}, {args.kernels} kernels", flush=True
    )

    val_tokens = val.tokens.to(device)
    history: list[dict[str, float]] = []

    def after(step: int, steps: int, losses: torch.Tensor) -> None:
        if step % args.eval_interval != 0 and step != steps:
            return
        since = int(history[-1]["step"]) if history else 0
        rounded = rounded_to_fp16(model)
        train_loss, val_loss = float(losses[since:].mean()), evaluate(rounded, val_tokens, args.batch_size)
        if all(val_loss < entry["val_loss"] for entry in history):
            rounded.half().save_pretrained(args.out)
        seconds = round(time.perf_counter() - started, 1)
        history.append({"step": step, "train_loss": train_loss, "val_loss": val_loss, "seconds": seconds})
        print(
            f"step {step:5d}/{steps}  train loss {train_loss:.4f}  val loss {val_loss:.4f}  {seconds:.0f} s", flush=True
        )

    with running_on(args.kernels, model):
        fit(model, train, args, after, started)

    best = min(history, key=lambda entry: entry["val_loss"])
    val_loss = best["val_loss"]
    bits_per_byte = val_loss * len(val.tokens) / val.num_bytes / math.log(2)
    print(f"val loss {val_loss:.4f}: perplexity {math.exp(val_loss):.2f}, {bits_per_byte:.3f} bits per byte")
    record = {
        "arguments": {
            k: v for k, v in vars(args).items() if k not in ("out", "source", "tokenizer", "prompt", "max_new_tokens")
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "parameters": model.num_parameters(),
        "train": {"files": train.num_files, "bytes": train.num_bytes, "tokens": len(train.tokens)},
        "val": {"files": val.num_files, "bytes": val.num_bytes, "tokens": len(val.tokens)},
        "val_bits_per_byte": bits_per_byte,
        "history": history,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    prompt = torch.tensor([tokenizer.encode(args.prompt).ids], device=device)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95, "pad_token_id": eos}
    room = min(args.max_new_tokens, args.context - prompt.shape[1])
    output = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, **options)
    print(f"sample:\n{tokenizer.decode(output[0].tolist())}")


if __name__ == "__main__":
    main()
