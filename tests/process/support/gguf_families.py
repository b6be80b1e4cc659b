"""Random models of every family whose GGUF files are served: as a folder, and as a file that the package `gguf` writes.

The folder is a model of tests/golden with the vocabulary of models/tiny. Names of tensors are those of the package."""

import json
import shutil
import struct

import gguf
import numpy as np

from gguf_files import neighbours
from kvasir_process import ROOT, TINY

ARCH = gguf.MODEL_ARCH
# {family: (golden model, architecture of the file, changes of config.json)}
FAMILIES = {
    "mixtral": ("mixtral-window", ARCH.LLAMA, {"sliding_window": None}),
    "qwen3moe": ("qwen3moe-not-normalized", ARCH.QWEN3MOE, {"use_sliding_window": False, "norm_topk_prob": True}),
    "olmo2": ("olmo2", ARCH.OLMO2, {}),
    "phi3": ("phi3-longrope-short", ARCH.PHI3, {}),
    "gemma3": ("gemma3-tied", ARCH.GEMMA3, {"num_hidden_layers": 7, "query_pre_attn_scalar": 10, "layer_types": None,
                                            "sliding_window_pattern": None, "_sliding_window_pattern": None}),
    "gemma2": ("gemma2-tied", ARCH.GEMMA2, {"query_pre_attn_scalar": 10}),
    "gptneox": ("neox-parallel-quarter", ARCH.GPTNEOX, {}),
}
EMBEDDINGS = {"model.embed_tokens.weight", "lm_head.weight", "gpt_neox.embed_in.weight", "embed_out.weight"}


def stored(folder):
    """{name: (shape, bytes)} of a model in bf16."""
    with open(folder / "model.safetensors", "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    return {name: (entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (shape, numbers) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_folder(family, folder):
    golden, _, changes = FAMILIES[family]
    golden = ROOT / "tests/golden/models" / golden
    config = json.loads((golden / "config.json").read_text())
    tensors, layers = stored(golden), config["num_hidden_layers"]
    tiny = json.loads((TINY / "config.json").read_text())
    config |= {name: tiny[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")} | changes
    config = {name: value for name, value in config.items() if value is not None}
    # If the model has more layers than the golden model, they repeat its layers.
    for layer in range(layers, config["num_hidden_layers"]):
        for name in list(tensors):
            if f".layers.{layer % layers}." in name:
                tensors[name.replace(f".layers.{layer % layers}.", f".layers.{layer}.")] = tensors[name]
    random = np.random.default_rng(7)
    for name in EMBEDDINGS & set(tensors):
        shape = [config["vocab_size"], config["hidden_size"]]
        numbers = random.standard_normal(shape, np.float32)
        tensors[name] = (shape, (numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def add_keys(writer, family, config):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if family == "gptneox":
        writer.add_rope_dimension_count(int(config["rotary_pct"] * head_dim))
        writer.add_parallel_residual(config["use_parallel_residual"])
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if family != "gemma2":
        writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    if family != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_dimension_count(int(config["partial_rotary_factor"] * head_dim))
        writer.add_sliding_window(0)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for name in ("long", "short"):
            factors = np.array(config["rope_scaling"][f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer):
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("dbrx")  # the pattern of models/tiny
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def numbers_of(shape, data):
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def in_file(family, config, folder):
    """Yields (name in the package's terms without "weight" or "bias", leaf, numbers). Experts are stacked."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    experts = {}
    for name, (shape, data) in stored(folder).items():
        values = numbers_of(shape, data)
        stem, leaf = name.rsplit(".", 1)
        module = stem.split(".")[-1]
        if family == "mixtral" and module in heads:
            values = neighbours(values, heads[module])
        if family.startswith("gemma") and stem.endswith("norm"):
            values = values + np.float32(1)
        if module == "query_key_value":  # for each head: query, key, value
            split = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            values = split.swapaxes(0, 1).reshape(values.shape)
        if ".experts." in stem:
            before, after = stem.split(".experts.")
            number, matrix = after.split(".")
            before = before.removeprefix("model.").replace("block_sparse_moe", "feed_forward") if family == "mixtral" else before
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(number)] = values
            continue
        yield stem, leaf, values
    for stem, matrices in experts.items():
        yield stem, "weight", np.stack([matrices[i] for i in range(len(matrices))])


def kind_of(name, values, kind):
    """The type of a tensor of a file whose matrices have the type `kind`, as far as they can."""
    if values.ndim == 1 or "gate_inp" in name or name.endswith(("mlp.gate", "block_sparse_moe.gate")):
        return gguf.GGMLQuantizationType.F32
    fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if fits else gguf.GGMLQuantizationType.BF16


def unpacked(folder, kind):
    """Returns stored(folder) with the numbers that remain after they were stored as `kind` in a file."""
    tensors = {}
    for name, (shape, data) in stored(folder).items():
        values = numbers_of(shape, data)
        own = kind_of(name.rsplit(".", 1)[0], values, kind)
        if own == kind:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, own), own)
        bits = values.view(np.uint32)  # rounded to the nearest, ties to even
        tensors[name] = (shape, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())
    return tensors


def make_file(family, folder, path, kind=gguf.GGMLQuantizationType.BF16, **split):
    config = json.loads((folder / "config.json").read_text())
    arch = FAMILIES[family][1]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], **split)
    add_keys(writer, family, config)
    add_tokenizer(writer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for stem, leaf, values in in_file(family, config, folder):
        name = f"{names.get_name(stem)}.{leaf}"
        own = kind_of(name, values, kind)
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
