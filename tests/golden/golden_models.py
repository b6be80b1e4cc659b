"""Tiny random-weight checkpoints of every family with float32 logits."""

import hashlib
import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

TOKENS = 48
# Cases with the option `greedy` also have the tokens that follow a prompt of this length.
GREEDY_PROMPT_TOKENS = 9
GREEDY_TOKENS = 64

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)

# The families below have a small vocabulary, and a context that is long enough for greedy tokens.
RECENT = SMALL | dict(
    vocab_size=53, intermediate_size=36, max_position_embeddings=96
)

# Heads have 8 dimensions, so that a quarter of a head is one RoPE pair.
LAYER_NORM = dict(
    vocab_size=41,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
NEOX = LAYER_NORM | dict(intermediate_size=32)
OPT = LAYER_NORM | dict(ffn_dim=32, word_embed_proj_dim=24)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, SMALL),
    "mistral": (MistralConfig, MistralForCausalLM, SMALL),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, SMALL),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, RECENT),
    "mixtral": (MixtralConfig, MixtralForCausalLM, RECENT),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, RECENT),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, RECENT | dict(pad_token_id=0)),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, RECENT),
    "phi3": (Phi3Config, Phi3ForCausalLM, RECENT | dict(pad_token_id=0)),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        RECENT | dict(hidden_size=24, head_dim=10, sliding_window=7, pad_token_id=0),
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {k: v for k, v in RECENT.items() if k != "rope_theta"}
        | dict(hidden_size=24, head_dim=10, sliding_window=7, pad_token_id=0),
    ),
    "neox": (GPTNeoXConfig, GPTNeoXForCausalLM, NEOX),
    "opt": (OPTConfig, OPTForCausalLM, OPT),
}

# Positions 32..47 are past the original context in every scaled case. With head_dim 16, each of the three ranges of the
# llama3 rule (kept, blended, divided) has at least one pair.
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONGROPE = dict(
    type="longrope",
    short_factor=[1.0, 1.1, 1.3, 1.4],
    long_factor=[1.0, 2.0, 3.5, 8.0],
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=24)


def model_cases():
    """Returns {name: (family, config overrides, stored dtype, options)}."""
    return {
        "llama-mha": ("llama", dict(vocab_size=131, num_key_value_heads=4), "float32", {}),
        "llama-gqa-tied": (
            "llama",
            dict(hidden_size=40, tie_word_embeddings=True),
            "float32",
            {},
        ),
        "llama-mqa-head-dim": (
            "llama",
            dict(
                vocab_size=89,
                hidden_size=42,
                intermediate_size=52,
                head_dim=16,
                num_attention_heads=3,
                num_key_value_heads=1,
                num_hidden_layers=3,
                rms_norm_eps=1e-6,
            ),
            "bfloat16",
            {},
        ),
        "llama-f16": (
            "llama",
            dict(num_hidden_layers=1),
            "float16",
            {"inv_freq": True, "torch_dtype_key": True},
        ),
        "llama-bias": (
            "llama",
            dict(attention_bias=True, mlp_bias=True),
            "bfloat16",
            {"torch_dtype_key": True},
        ),
        "llama3-scaled-sharded": (
            "llama",
            dict(
                head_dim=16,
                max_position_embeddings=256,
                rope_scaling=LLAMA3,
                bos_token_id=94,
                eos_token_id=[95, 96],
            ),
            "bfloat16",
            {"max_shard_size": "16KB", "generation": True},
        ),
        "llama3-scaled-v5-config": (
            "llama",
            dict(
                head_dim=16,
                max_position_embeddings=256,
                rope_scaling=LLAMA3,
                num_hidden_layers=1,
            ),
            "bfloat16",
            {"v5_config": True},
        ),
        "llama-yarn": (
            "llama",
            dict(head_dim=16, max_position_embeddings=96, rope_scaling=YARN),
            "bfloat16",
            {},
        ),
        "llama-yarn-mscale": (
            "llama",
            dict(
                head_dim=16,
                max_position_embeddings=96,
                rope_scaling=YARN
                | dict(mscale=0.8, mscale_all_dim=0.3, beta_fast=4.0, beta_slow=0.5),
            ),
            "float16",
            {},
        ),
        "llama-yarn-attention-factor": (
            "llama",
            dict(
                head_dim=16,
                max_position_embeddings=96,
                rope_scaling=YARN
                | dict(attention_factor=1.3, beta_fast=8.0, truncate=False),
            ),
            "bfloat16",
            {"legacy_rope_type": True, "torch_dtype_key": True},
        ),
        "mistral-window": (
            "mistral",
            dict(hidden_size=40, head_dim=16, sliding_window=13),
            "bfloat16",
            {},
        ),
        "mistral-no-window": (
            "mistral",
            dict(sliding_window=None, num_key_value_heads=1),
            "bfloat16",
            {"generation": True},
        ),
        "qwen2-tied": (
            "qwen2",
            dict(
                vocab_size=137,
                hidden_size=40,
                num_attention_heads=4,
                tie_word_embeddings=True,
                rope_theta=1000000.0,
                rms_norm_eps=1e-6,
            ),
            "bfloat16",
            {"generation": True},
        ),
        "qwen2-untied": ("qwen2", dict(hidden_size=24), "float32", {}),
        "qwen2-yarn": (
            "qwen2",
            dict(
                hidden_size=64,
                num_hidden_layers=1,
                max_position_embeddings=24,
                rope_scaling=YARN,
            ),
            "bfloat16",
            {"legacy_rope_type": True},
        ),
        "qwen2-window-upper-layers": (
            "qwen2",
            dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
            "bfloat16",
            {},
        ),
        "neox-parallel-quarter": ("neox", {}, "bfloat16", {}),
        "neox-serial-half": (
            "neox",
            dict(
                use_parallel_residual=False,
                rotary_pct=0.5,
                rotary_emb_base=1000,
                hidden_act="gelu_new",
                layer_norm_eps=1e-3,
            ),
            "float16",
            {"torch_dtype_key": True},
        ),
        "neox-whole-heads": (
            "neox",
            dict(
                num_hidden_layers=1,
                rotary_pct=1.0,
                attention_bias=False,
                tie_word_embeddings=True,
            ),
            "bfloat16",
            {},
        ),
        "opt-tied": ("opt", {}, "bfloat16", {}),
        "opt-untied-no-bias": (
            "opt",
            dict(
                num_hidden_layers=1,
                activation_function="gelu",
                enable_bias=False,
                tie_word_embeddings=False,
            ),
            "bfloat16",
            {"old_names": True},
        ),
        "qwen3-tied": (
            "qwen3",
            dict(
                hidden_size=24,
                head_dim=16,
                num_hidden_layers=3,
                tie_word_embeddings=True,
                rope_theta=1000000.0,
                rms_norm_eps=1e-6,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "qwen3-bias-window": (
            "qwen3",
            dict(
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=10,
                attention_bias=True,
                use_sliding_window=True,
                sliding_window=9,
                max_window_layers=1,
            ),
            "bfloat16",
            {"greedy": True, "v5_config": True},
        ),
        "smollm3-tied": (
            "smollm3",
            dict(
                hidden_size=24,
                num_hidden_layers=5,
                tie_word_embeddings=True,
                rope_theta=2000000.0,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "mixtral-window": (
            "mixtral",
            dict(
                intermediate_size=20,
                num_local_experts=5,
                num_experts_per_tok=2,
                sliding_window=10,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "mixtral-one-of-three": (
            "mixtral",
            dict(
                hidden_size=24,
                head_dim=10,
                num_local_experts=3,
                num_experts_per_tok=1,
                tie_word_embeddings=True,
            ),
            "float32",
            {"greedy": True},
        ),
        "mixtral-all-experts": (
            "mixtral",
            dict(
                num_key_value_heads=4,
                intermediate_size=28,
                num_local_experts=3,
                num_experts_per_tok=3,
                sliding_window=None,
            ),
            "float16",
            {"greedy": True, "v5_config": True},
        ),
        "qwen3moe-mixed": (
            "qwen3moe",
            dict(
                head_dim=16,
                num_hidden_layers=5,
                num_experts=7,
                num_experts_per_tok=3,
                moe_intermediate_size=12,
                decoder_sparse_step=2,
                mlp_only_layers=[1],
                norm_topk_prob=True,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "qwen3moe-not-normalized": (
            "qwen3moe",
            dict(
                head_dim=10,
                num_experts=11,
                num_experts_per_tok=2,
                moe_intermediate_size=18,
                norm_topk_prob=False,
                attention_bias=True,
                use_sliding_window=True,
                sliding_window=9,
                tie_word_embeddings=True,
            ),
            "bfloat16",
            {"greedy": True, "v5_config": True},
        ),
        "olmo2": (
            "olmo2",
            dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1),
            "bfloat16",
            {"greedy": True, "v5_config": True},
        ),
        "olmo2-bias-tied": (
            "olmo2",
            dict(
                hidden_size=24,
                num_key_value_heads=4,
                head_dim=10,
                attention_bias=True,
                tie_word_embeddings=True,
                rope_theta=500000.0,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "phi3-part-window": (
            "phi3",
            dict(partial_rotary_factor=0.75, sliding_window=11),
            "bfloat16",
            {"greedy": True},
        ),
        # All positions are within the original context.
        "phi3-longrope-short": (
            "phi3",
            dict(
                max_position_embeddings=512,
                original_max_position_embeddings=128,
                rope_scaling=LONGROPE,
                tie_word_embeddings=True,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        # The context is longer than the original one.
        "phi3-longrope-long": (
            "phi3",
            dict(
                num_hidden_layers=1,
                original_max_position_embeddings=24,
                rope_scaling=LONGROPE,
            ),
            "bfloat16",
            {"v5_config": True},
        ),
        # The caps are so low that most scores and logits change.
        "gemma2-tied": (
            "gemma2",
            dict(
                num_hidden_layers=3,
                query_pre_attn_scalar=12,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=3.0,
                tie_word_embeddings=True,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "gemma2-full-bias": (
            "gemma2",
            dict(
                num_key_value_heads=1,
                attention_bias=True,
                layer_types=["full_attention", "full_attention"],
                final_logit_softcapping=None,
            ),
            "bfloat16",
            {"greedy": True, "v5_config": True},
        ),
        "gemma3-tied": (
            "gemma3",
            dict(
                num_hidden_layers=4,
                sliding_window_pattern=3,
                query_pre_attn_scalar=12,
                tie_word_embeddings=True,
            ),
            "bfloat16",
            {"greedy": True},
        ),
        "gemma3-scaled-v5-config": (
            "gemma3",
            dict(
                num_hidden_layers=3,
                num_key_value_heads=1,
                query_pre_attn_scalar=10,
                attention_bias=True,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                rope_theta=50000.0,
                rope_local_base_freq=3000.0,
                rope_scaling=dict(rope_type="linear", factor=4.0),
            ),
            "bfloat16",
            {"greedy": True, "v5_layer_types": True},
        ),
        "smollm3-window": (
            "smollm3",
            dict(
                head_dim=10,
                num_key_value_heads=1,
                num_hidden_layers=3,
                no_rope_layers=[0, 1, 0],
                vocab_size=59,
                use_sliding_window=True,
                sliding_window=7,
                attention_bias=True,
                mlp_bias=True,
            ),
            "bfloat16",
            {"greedy": True, "v5_config": True},
        ),
    }


def seed_of(*parts):
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def normal(shape, std, *seed):
    rng = np.random.Generator(np.random.PCG64(seed_of(*seed)))
    # Box-Muller over raw words: numpy does not promise that its own normal
    # distribution stays the same between releases.
    words = rng.integers(1, 2**32, size=(2, int(np.prod(shape))), dtype=np.uint64)
    u = words.astype(np.float64) / 2**32
    values = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    return torch.from_numpy((values * std).astype(np.float32).reshape(shape))


def weight_for(case, name, shape, hidden):
    """Returns a random weight. Its scale makes attention far from uniform, makes every bias matter and gives logits a
    standard deviation of about 2."""
    if name.endswith("norm.weight"):
        # Gemma adds 1 to the weights of its norms.
        mean = 0.0 if case.startswith("gemma") else 1.0
        return mean + normal(shape, 0.2, case, name)
    if name.endswith("bias"):
        return normal(shape, 0.5, case, name)
    if "embed" in name or "lm_head" in name:
        return normal(shape, 2.0 * hidden**-0.5, case, name)
    attends = ("q_proj", "k_proj", "query_key_value")
    is_router = name.endswith("mlp.gate.weight") or "moe.gate." in name
    gain = 2.0 if is_router or any(part in name for part in attends) else 1.0
    return normal(shape, gain * shape[-1] ** -0.5, case, name)


def edit_config(path, options):
    config = json.loads(path.read_text())
    if options.get("torch_dtype_key"):
        config["torch_dtype"] = config.pop("dtype")
    if options.get("legacy_rope_type"):
        scaling = config["rope_scaling"]
        scaling["type"] = scaling.pop("rope_type")
    if options.get("v5_config"):
        config["rope_parameters"] = config.pop("rope_scaling", None) or {
            "rope_type": "default"
        }
        config["rope_parameters"]["rope_theta"] = config.pop("rope_theta")
        if "num_experts" in config:
            config["num_local_experts"] = config.pop("num_experts")
    if options.get("v5_layer_types"):
        full = config.pop("rope_scaling") | dict(rope_theta=config.pop("rope_theta"))
        local = dict(rope_theta=config.pop("rope_local_base_freq"), rope_type="default")
        config["rope_parameters"] = dict(full_attention=full, sliding_attention=local)
        del config["_sliding_window_pattern"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def greedy_tokens(reference, ids):
    """Returns the tokens that follow `ids`, each the most probable one."""
    ids = [int(i) for i in ids]
    prompt_tokens = len(ids)
    for _ in range(GREEDY_TOKENS):
        with torch.no_grad():
            logits = reference(torch.tensor(ids)[None]).logits[0, -1]
        first, second = torch.topk(logits, 2).values
        assert float(first - second) > 1e-3, "the most probable token is not clear"
        ids.append(int(logits.argmax()))
    return ids[prompt_tokens:]


def write_model(folder, name, case):
    family, overrides, dtype, options = case
    config_class, model_class, base = FAMILIES[family]
    config = config_class(**(base | overrides), attn_implementation="eager")
    model = model_class(config).eval()
    if not options.get("generation"):
        model.generation_config = GenerationConfig()
    else:
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            do_sample=True,
            temperature=0.6,
            top_k=40,
            top_p=0.9,
            repetition_penalty=1.05,
        )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(
                weight_for(name, key, tuple(parameter.shape), config.hidden_size)
            )
    stored = getattr(torch, dtype)
    model.to(stored)
    shards = {"max_shard_size": options.get("max_shard_size", "1GB")}
    model.save_pretrained(folder, **shards)
    if not options.get("generation"):
        (folder / "generation_config.json").unlink(missing_ok=True)
    if options.get("old_names"):
        # Writes OPT with the names that a checkpoint without an output head has.
        file = folder / "model.safetensors"
        tensors = {k.removeprefix("model."): v for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    if options.get("inv_freq"):
        # Early Llama 2 checkpoints have this buffer; readers skip it.
        file = folder / "model.safetensors"
        tensors = load_file(file)
        head_dim = config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, head_dim, 2).float() / head_dim
        key = "model.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[key] = (config.rope_theta**-powers).to(stored)
        save_file(tensors, file, metadata={"format": "pt"})
    edit_config(folder / "config.json", options)

    # model.float() would keep the rounded buffer of RoPE, so the float32 model is built anew from the stored weights.
    reference = model_class(config).eval()
    reference.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    words = np.random.Generator(np.random.PCG64(seed_of(name, "ids")))
    ids = words.integers(0, config.vocab_size, size=TOKENS, dtype=np.uint64)
    with torch.no_grad():
        logits = reference(torch.tensor(ids.astype(np.int64))[None]).logits[0]
    assert logits.dtype == torch.float32 and bool(torch.isfinite(logits).all())
    spread = float(logits.std())
    assert 1.0 < spread < 4.0, (name, spread)
    expected = {
        "input_ids": [int(i) for i in ids],
        "logits_file": "expected.f32",
        "logits_shape": list(logits.shape),
    }
    if options.get("greedy"):
        expected["greedy"] = greedy_tokens(reference, ids[:GREEDY_PROMPT_TOKENS])
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    logits.numpy().astype("<f4").tofile(folder / "expected.f32")
    print(f"  {name}: logit std {spread:.2f}, max {float(logits.abs().max()):.1f}")


BASE = dict(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    hidden_act="silu",
    torch_dtype="bfloat16",
)


def refused_cases():
    """Returns {name: (config.json, word that the error must contain)}."""
    llama = BASE | dict(architectures=["LlamaForCausalLM"], model_type="llama")
    qwen2 = BASE | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    neox = LAYER_NORM | dict(
        architectures=["GPTNeoXForCausalLM"],
        model_type="gpt_neox",
        intermediate_size=32,
        hidden_act="gelu",
        rotary_pct=0.25,
    )
    opt = LAYER_NORM | dict(
        architectures=["OPTForCausalLM"], model_type="opt", ffn_dim=32
    )
    longrope = dict(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=32,
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
    )
    return {
        "qwen2-shared-expert": (
            BASE
            | dict(
                architectures=["Qwen2MoeForCausalLM"],
                model_type="qwen2_moe",
                num_experts=4,
                num_experts_per_tok=2,
            ),
            "Qwen2MoeForCausalLM",
        ),
        "gpt2": (
            dict(
                architectures=["GPT2LMHeadModel"],
                model_type="gpt2",
                vocab_size=131,
                n_embd=32,
                n_head=4,
                n_layer=2,
                n_positions=64,
                activation_function="gelu_new",
                layer_norm_epsilon=1e-5,
            ),
            "GPT2LMHeadModel",
        ),
        "gemma": (
            BASE
            | dict(
                architectures=["GemmaForCausalLM"],
                model_type="gemma",
                head_dim=8,
                hidden_activation="gelu_pytorch_tanh",
            ),
            "GemmaForCausalLM",
        ),
        "no-architecture": (
            {k: v for k, v in llama.items() if k != "architectures"}
            | dict(model_type="unheard-of"),
            "unheard-of",
        ),
        "llama-longrope": (llama | dict(rope_scaling=longrope), "longrope"),
        "llama-quantized": (
            llama
            | dict(quantization_config=dict(quant_method="gptq", bits=4, group_size=32)),
            "quantization_config",
        ),
        "llama-relu": (llama | dict(hidden_act="relu2"), "relu2"),
        "llama-heads-do-not-divide": (
            llama | dict(num_key_value_heads=3),
            "num_key_value_heads",
        ),
        "neox-rotary-pct-of-no-pairs": (neox | dict(rotary_pct=0.4), "rotary_pct"),
        "neox-selu": (neox | dict(hidden_act="selu"), "hidden_act"),
        "opt-norms-after": (
            opt | dict(do_layer_norm_before=False),
            "do_layer_norm_before",
        ),
        "opt-narrow-embedding": (
            opt | dict(word_embed_proj_dim=16),
            "word_embed_proj_dim",
        ),
        "opt-no-last-norm": (
            opt | dict(_remove_final_layer_norm=True),
            "_remove_final_layer_norm",
        ),
        "opt-norms-without-weights": (
            opt | dict(layer_norm_elementwise_affine=False),
            "layer_norm_elementwise_affine",
        ),
        "qwen2-no-hidden-size": (
            {k: v for k, v in qwen2.items() if k != "hidden_size"},
            "hidden_size",
        ),
    }


def write(root):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for folder in (root / "models", root / "refused"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name, case in model_cases().items():
        write_model(root / "models" / name, name, case)
    words = {}
    for name, (config, word) in refused_cases().items():
        (root / "refused" / name).mkdir()
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (root / "refused" / name / "config.json").write_text(text)
        words[name] = word
    text = json.dumps(words, indent=2, sort_keys=True) + "\n"
    (root / "refused" / "refused.json").write_text(text)
