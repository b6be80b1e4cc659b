#!/usr/bin/env python3
"""Trains a small Llama model on a text, from random weights.

    pip install -r requirements.txt
    ./pretrain.py --text train.txt --valid valid.txt --tokenizer . --out DIR \\
        --steps 1060

Writes config.json, generation_config.json, the tokenizer and model.safetensors
(bf16) in the Hugging Face form. Muon for the matrices inside the layers, AdamW
for the rest; the learning rate warms up and falls by a cosine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
import sys
import time

try:
    import safetensors.torch
    import tokenizers
    import torch
    import torch.nn.functional as F
    MISSING = None
except ImportError as error:
    MISSING = error

NORM_EPS = 1e-5
ROPE_THETA = 10000.0
VALIDATION_TOKENS = 1024
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json",
                   "special_tokens_map.json")


class UsageError(Exception):
    """An error that the user can fix; the message says how."""


def crop_ramp(text: str) -> list[tuple[float, int]]:
    """"256,512@0.65" is crops of 256 tokens, of 512 from 65 % of the steps."""
    try:
        stages = [stage.partition("@") for stage in text.split(",")]
        ramp = [(float(begin or 0), int(tokens)) for tokens, _, begin in stages]
    except ValueError:
        ramp = []
    begins = [begin for begin, _ in ramp]
    if not ramp or begins != sorted(begins) or begins[0] != 0 or begins[-1] >= 1:
        raise argparse.ArgumentTypeError(
            f"want TOKENS or TOKENS,TOKENS@PART with parts that rise within "
            f"[0, 1), have '{text}'")
    return ramp


def above_0(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want an integer above 0, have '{text}'")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def add(flag: str, default: int | float, text: str) -> None:
        kind = above_0 if isinstance(default, int) else float
        parser.add_argument(flag, type=kind, default=default, help=text)

    for flag, text in (("--text", "text to train on, UTF-8"),
                       ("--tokenizer", "folder with tokenizer.json"),
                       ("--out", "folder to write the checkpoint into")):
        parser.add_argument(flag, type=pathlib.Path, required=True, help=text)
    parser.add_argument("--valid", type=pathlib.Path,
                        help="text to measure the result on")
    parser.add_argument("--steps", type=above_0, required=True,
                        help="optimizer steps")
    parser.add_argument("--crops", type=crop_ramp, metavar="TOKENS[,TOKENS@PART]",
                        default="256,512@0.65,1024@0.88",
                        help="tokens of a crop, from a part of the steps on")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"),
                        default="auto", help="auto: a GPU if there is one")
    add("--batch", 4096, "tokens per step")
    add("--micro-batch", 4096, "tokens at a time; bounds the memory")
    add("--lr", 4e-3, "peak learning rate")
    add("--warmup", 0.03, "part of the steps that warm up")
    add("--final-lr", 0.02, "last learning rate, as a part of the peak")
    add("--weight-decay", 0.1, "of matrices")
    add("--clip", 1.0, "largest norm of a gradient")
    add("--seed", 1, "seed of weights and order")
    add("--layers", 6, "layers")
    add("--hidden", 256, "width of the residual stream")
    add("--intermediate", 640, "width of the MLP")
    add("--heads", 16, "query heads")
    add("--kv-heads", 8, "KV heads")
    add("--head-dim", 32, "numbers per head")
    add("--context", 1024, "longest context, tokens")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    if args.heads % args.kv_heads != 0 or args.head_dim % 2 != 0:
        raise UsageError("want --heads a multiple of --kv-heads and --head-dim "
                         f"even, have {args.heads}, {args.kv_heads} and "
                         f"{args.head_dim}")
    for _, crop in args.crops:
        if not 2 <= crop <= min(args.context, args.batch):
            raise UsageError(f"--crops: want 2 to --context {args.context} and "
                             f"--batch {args.batch} tokens, have {crop}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no GPU here")
    if not (args.tokenizer / TOKENIZER_FILES[0]).is_file():
        raise UsageError(f"{args.tokenizer} has no {TOKENIZER_FILES[0]}")


def token_id(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer,
             name: str) -> int:
    """The id of "bos_token" or "eos_token" in tokenizer_config.json."""
    path = folder / TOKENIZER_FILES[1]
    token = json.loads(path.read_text(encoding="utf-8")).get(name)
    if isinstance(token, dict):
        token = token.get("content")
    found = None if token is None else tokenizer.token_to_id(token)
    if found is None:
        raise UsageError(f"{path}: {name} names no token")
    return found


def encode(tokenizer: tokenizers.Tokenizer, path: pathlib.Path) -> torch.Tensor:
    # The text is read line by line: lines are paragraphs, and no token crosses
    # them.
    with path.open(encoding="utf-8", newline="\n") as lines:
        encoded = tokenizer.encode_batch_fast(list(lines),
                                              add_special_tokens=False)
    return torch.tensor([token for line in encoded for token in line.ids])


def new_weights(args: argparse.Namespace, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random weights under the names of a checkpoint. They have a third of the
    variance that keeps activations level. Matrices that add to the residual
    stream are scaled down by its depth."""
    weights: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(args.seed)

    def draw(name: str, rows: int, columns: int, deviation: float) -> None:
        weights[name + ".weight"] = torch.empty(rows, columns).normal_(
            0, deviation, generator=generator)

    hidden = args.hidden
    residual = 1 / math.sqrt(2 * args.layers)
    draw("model.embed_tokens", vocab_size, hidden, 0.02)
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, scale in (
                ("input_layernorm", 0, 0, 0),
                ("self_attn.q_proj", args.heads * args.head_dim, hidden, 1),
                ("self_attn.k_proj", args.kv_heads * args.head_dim, hidden, 1),
                ("self_attn.v_proj", args.kv_heads * args.head_dim, hidden, 1),
                ("self_attn.o_proj", hidden, args.heads * args.head_dim, residual),
                ("post_attention_layernorm", 0, 0, 0),
                ("mlp.gate_proj", args.intermediate, hidden, 1),
                ("mlp.up_proj", args.intermediate, hidden, 1),
                ("mlp.down_proj", hidden, args.intermediate, residual)):
            if rows == 0:
                weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
            else:
                draw(prefix + name, rows, columns, scale / math.sqrt(3 * columns))
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def rotation(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """cos and sin of every position and pair, [2, T, head_dim / 2]."""
    pairs = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    frequencies = ROPE_THETA ** (-pairs / args.head_dim)
    angles = torch.arange(args.context)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).float().to(device)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    cos, sin = turn[:, :x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def logits(args: argparse.Namespace, weights: dict[str, torch.Tensor],
           turn: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """ids [B, T] to [B, T, V]; the head is the embedding."""

    def normal(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], NORM_EPS)

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[name + ".weight"])

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return product(x, name).unflatten(-1, (-1, args.head_dim)).transpose(1, 2)

    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}."
        y = normal(x, prefix + "input_layernorm")
        attended = F.scaled_dot_product_attention(
            rotate(heads(y, prefix + "self_attn.q_proj"), turn),
            rotate(heads(y, prefix + "self_attn.k_proj"), turn),
            heads(y, prefix + "self_attn.v_proj"),
            is_causal=True, enable_gqa=True)
        x = x + product(attended.transpose(1, 2).flatten(2),
                        prefix + "self_attn.o_proj")
        y = normal(x, prefix + "post_attention_layernorm")
        x = x + product(F.silu(product(y, prefix + "mlp.gate_proj"))
                        * product(y, prefix + "mlp.up_proj"),
                        prefix + "mlp.down_proj")
    return product(normal(x, "model.norm"), "model.embed_tokens")


class Crops:
    """Random crops of a text. No token comes twice before all have come once.
    Every second crop begins with the start token, like a prompt."""

    def __init__(self, ids: torch.Tensor, bos: int, seed: int) -> None:
        self.ids = ids
        self.bos = bos
        self.generator = torch.Generator().manual_seed(seed)
        self.length = 0
        self.begins: list[int] = []
        self.taken = 0

    def take(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [count, length] each."""
        if length != self.length:
            self.length, self.begins = length, []
        inputs, targets = [], []
        for _ in range(count):
            if not self.begins:
                self.begins = self.new_epoch()
            begin = self.begins.pop()
            crop = self.ids[begin:begin + length + 1]
            inputs.append(crop[:-1].clone())
            targets.append(crop[1:])
            if self.taken % 2 == 0:
                inputs[-1][0] = self.bos
            self.taken += 1
        return torch.stack(inputs), torch.stack(targets)

    def new_epoch(self) -> list[int]:
        room = len(self.ids) - 1  # a crop's last target comes after it
        windows = max(room // self.length - 1, 1)
        slack = room - windows * self.length
        start = int(torch.randint(slack + 1, (), generator=self.generator))
        order = torch.randperm(windows, generator=self.generator)
        return [start + int(window) * self.length for window in order]


def rate(args: argparse.Namespace, step: int) -> float:
    """The learning rate of a step, as a part of the peak."""
    part = (step + 0.5) / args.steps
    if part < args.warmup:
        return part / args.warmup
    done = (part - args.warmup) / (1 - args.warmup)
    return args.final_lr + (1 - args.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Muon:
    """The optimizer of the matrices inside the layers. Its momentum update is made
    roughly orthogonal, and scaled to AdamW's usual root mean square, so that one
    learning rate suits both. (torch.optim.Muon multiplies in bf16, which
    most CPUs do slowly.)"""

    MOMENTUM = 0.95
    # Coefficients of the published quintic iteration, chosen for a steep slope
    # at 0.
    A, B, C = 3.4445, -4.7750, 2.0315

    def __init__(self, matrices: list[torch.Tensor], weight_decay: float) -> None:
        self.slots = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]
        self.weight_decay = weight_decay

    def step(self, lr: float) -> None:
        for matrix, momentum in self.slots:
            momentum.lerp_(matrix.grad, 1 - self.MOMENTUM)
            ahead = matrix.grad.lerp(momentum, self.MOMENTUM)
            matrix.mul_(1 - lr * self.weight_decay)
            matrix.add_(self.orthogonal(ahead),
                        alpha=-0.2 * lr * math.sqrt(max(matrix.shape)))

    def orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if tall else matrix
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = self.A * x + (self.B * gram + self.C * gram @ gram) @ x
        return x.T if tall else x


def train(args: argparse.Namespace, weights: dict[str, torch.Tensor],
          turn: torch.Tensor, crops: Crops) -> float:
    """The last step's loss in nats per token."""
    for weight in weights.values():
        weight.requires_grad_(True)
    inner = [w for name, w in weights.items() if w.dim() == 2 and ".layers." in name]
    outer = [w for name, w in weights.items() if w.dim() == 2 and ".layers." not in name]
    norms = [w for w in weights.values() if w.dim() == 1]
    muon = Muon(inner, args.weight_decay)
    adamw = torch.optim.AdamW(
        [{"params": outer, "weight_decay": args.weight_decay},
         {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95))
    started = time.monotonic()
    last_line = -math.inf
    seen = 0
    loss = math.nan
    for step in range(args.steps):
        length = [crop for begin, crop in args.crops if begin <= step / args.steps][-1]
        count = args.batch // length
        at_a_time = max(args.micro_batch // length, 1)
        inputs, targets = crops.take(count, length)
        loss = 0.0
        for i in range(0, count, at_a_time):
            scores = logits(args, weights, turn,
                            inputs[i:i + at_a_time].to(turn.device))
            part = F.cross_entropy(
                scores.flatten(0, 1),
                targets[i:i + at_a_time].flatten().to(turn.device),
                reduction="sum") / targets.numel()
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(weights.values(), args.clip)
        lr = args.lr * rate(args, step)
        for group in adamw.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            muon.step(lr)
        adamw.step()
        for weight in weights.values():
            weight.grad = None
        if not math.isfinite(loss):
            raise UsageError(f"the loss of step {step + 1} is {loss}; a lower "
                             "--lr may help")
        seen += targets.numel()
        now = time.monotonic()
        if now - last_line >= 10 or step + 1 == args.steps:
            last_line = now
            print(f"step {step + 1} of {args.steps}, loss {loss:.4f}, crops "
                  f"{length}, {seen} tokens, {seen / (now - started):.0f} "
                  "tokens/s", file=sys.stderr, flush=True)
    return loss


def nats_per_token(args: argparse.Namespace, weights: dict[str, torch.Tensor],
                   turn: torch.Tensor, ids: torch.Tensor, bos: int) -> float:
    """The loss over a whole text, in windows that begin with the start token."""
    total = 0.0
    for targets in ids.split(min(VALIDATION_TOKENS, args.context)):
        inputs = torch.cat((torch.tensor([bos]), targets[:-1]))
        scores = logits(args, weights, turn, inputs[None].to(turn.device))
        total += F.cross_entropy(scores[0], targets.to(turn.device),
                                 reduction="sum").item()
    return total / len(ids)


def replace(path: pathlib.Path, write) -> None:
    """Writes a file that appears only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def write_checkpoint(args: argparse.Namespace, weights: dict[str, torch.Tensor],
                     vocab_size: int, bos: int, eos: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "initializer_range": 0.02,
        "intermediate_size": args.intermediate,
        "max_position_embeddings": args.context,
        "mlp_bias": False,
        "num_attention_heads": args.heads,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    for name, value in (("config.json", config),
                        ("generation_config.json",
                         {"bos_token_id": bos, "eos_token_id": eos})):
        text = json.dumps(value, indent=2) + "\n"
        replace(args.out / name, lambda path, text=text: path.write_text(text))
    for name in TOKENIZER_FILES:
        source = args.tokenizer / name
        if source.exists() and args.tokenizer.resolve() != args.out.resolve():
            shutil.copyfile(source, args.out / name)
    stored = {name: weight.to("cpu", torch.bfloat16)
              for name, weight in weights.items()}
    replace(args.out / "model.safetensors", lambda path:
            safetensors.torch.save_file(stored, path, metadata={"format": "pt"}))


def run(args: argparse.Namespace) -> None:
    if MISSING is not None:
        raise UsageError(f"{MISSING}: pip install -r "
                         f"{pathlib.Path(__file__).with_name('requirements.txt')}")
    check(args)
    use_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it
    tokenizer = tokenizers.Tokenizer.from_file(
        str(args.tokenizer / TOKENIZER_FILES[0]))
    bos = token_id(args.tokenizer, tokenizer, "bos_token")
    eos = token_id(args.tokenizer, tokenizer, "eos_token")
    ids = encode(tokenizer, args.text)
    longest = max(crop for _, crop in args.crops)
    if len(ids) <= longest:
        raise UsageError(f"{args.text} has {len(ids)} tokens, want more than "
                         f"{longest} (--crops)")
    held_out = encode(tokenizer, args.valid) if args.valid else None
    args.out.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.get_vocab_size()
    weights = {name: weight.to(device)
               for name, weight in new_weights(args, vocab_size).items()}
    print(f"{sum(map(torch.Tensor.numel, weights.values()))} parameters, "
          f"{len(ids)} tokens of text, on {device}", file=sys.stderr)
    turn = rotation(args, device)
    loss = train(args, weights, turn, Crops(ids, bos, args.seed))
    with torch.no_grad():
        # The loss is measured with the weights that are written.
        weights = {name: weight.bfloat16().float()
                   for name, weight in weights.items()}
        write_checkpoint(args, weights, vocab_size, bos, eos)
        result = f"loss {loss:.4f}"
        if held_out is not None and len(held_out) > 0:
            nats = nats_per_token(args, weights, turn, held_out, bos)
            per_byte = nats * len(held_out) / args.valid.stat().st_size
            result += (f", validation {per_byte:.4f} nats per byte ({nats:.4f} "
                       "nats per token)")
    print(f"{args.out}: {result}")


def main() -> None:
    try:
        run(arguments())
    except (UsageError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"pretrain.py: {error}")


if __name__ == "__main__":
    main()
