"""With --model FILE.gguf, every command has the same results as with a folder that has the same weights."""

import io
import json
import subprocess
import zipfile

import gguf
import grpc
import pytest

import gguf_families
import gguf_files
import triton
from kvasir_process import BINARY, TINY, KvasirProcess, run

PROMPT = "It was a bright cold day, and"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """files("Q8_0") returns the path of a GGUF file whose matrices have this type. Each file is made only once."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def file(kind, **options):
        key = (kind, *options.items())
        if key not in made:
            made[key] = gguf_files.write(TINY, folder / f"tiny-{kind}-{len(made)}.gguf", kind, **options)
        return made[key]

    return file


def generate(model, *flags):
    return run("generate", "--model", model, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", 40, *flags).stdout


def loss(model):
    report = run("perplexity", "--model", model, "--kv-dtype", "f32", "--text", TINY / "evaluation.txt", "--max-windows", 2, "--json")
    return json.loads(report.stdout)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_gguf_file_gives_the_tokens_and_the_loss_of_the_folder_with_its_numbers(files, kind):
    flags = ["--kv-dtype", "f32"]
    assert generate(files(kind), *flags) == generate(TINY, *flags)
    have, want = loss(files(kind)), loss(TINY)
    assert have["tokens"] == want["tokens"]
    # A few weights are too small for float16.
    assert have["nats_per_byte"] == pytest.approx(want["nats_per_byte"], abs=1e-6 if kind == "F16" else 0)


@pytest.mark.parametrize("kind, most", [("Q8_0", 0.002), ("Q5_1", 0.02), ("Q5_0", 0.02), ("Q4_1", 0.05), ("Q4_0", 0.05),
                                        ("Q4_K", 0.05)])
def test_quantized_weights_are_served_with_nearly_the_same_loss(files, kind, most):
    assert generate(files(kind)).startswith(PROMPT)
    apart = loss(files(kind))["nats_per_byte"] - loss(TINY)["nats_per_byte"]
    assert -0.01 < apart < most


def test_convert_writes_a_folder_that_gives_the_same_text(files, tmp_path):
    folder = tmp_path / "folder"
    assert run("convert", "--gguf", files("Q4_0"), "--out", folder).stdout == f"{folder}\n"
    assert generate(folder) == generate(files("Q4_0"))
    assert loss(folder)["nats_per_byte"] == loss(files("Q4_0"))["nats_per_byte"]
    refused = run("convert", "--gguf", files("Q4_0"), "--out", folder, check=False)
    assert refused.returncode == 1 and f"{folder} exists" in refused.stderr


def test_inspect_and_check_plan_accept_a_gguf_file(files):
    report = json.loads(run("inspect", "--model", files("Q8_0"), "--json").stdout)
    assert report["served"]
    text = run("check-plan", "--model", files("Q8_0"), "--kv-plan", "rotated-4bit").stdout
    assert "KL" in text or "kl" in text, text


@pytest.mark.parametrize("family", [None, "mixtral", "phi3"])
def test_two_ranks_give_the_same_tokens_as_one_rank(files, families, family):
    file = families(family)[1] if family else files("Q8_0")
    texts = []
    for tp in (1, 2):
        with KvasirProcess("serve", "--tp", tp, "--threads", "1", "--plan-check", "off", model=file) as server:
            name = server.ready["model"]
            assert name == file.stem
            texts.append(triton.generate(server.grpc, name, PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True))
    assert texts[0] == texts[1]


def data_of(message):
    """The bytes of the first field of a GetTokenizerChunk."""
    if not message or message[0] != 0x0A:
        return b""
    size, at, shift = 0, 1, 0
    while True:
        size |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return message[at:at + size]


def test_a_gateway_gets_the_files_of_a_model_folder_for_a_gguf_file(files, tmp_path):
    with KvasirProcess("serve", "--plan-check", "off", model=files("BF16")) as server, grpc.insecure_channel(server.grpc) as channel:
        chunks = channel.unary_stream("/vllm.grpc.engine.VllmEngine/GetTokenizer")(b"", timeout=60)
        archive = zipfile.ZipFile(io.BytesIO(b"".join(map(data_of, chunks))))
    assert sorted(archive.namelist()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    settings, own = (json.loads(text) for text in (archive.read("tokenizer_config.json"),
                                                   (TINY / "tokenizer_config.json").read_text()))
    assert settings["chat_template"] == own["chat_template"] and settings["eos_token"] == own["eos_token"]
    assert json.loads(archive.read("config.json"))["num_key_value_heads"] == 8


def test_the_error_for_an_invalid_gguf_file_names_it(files, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files("BF16").read_bytes()[:-5000])
    refused = run("serve", "--model", cut, check=False)
    assert refused.returncode == 1
    assert "cut.gguf: tensor" in refused.stderr and "truncated" in refused.stderr

    bytes_ = bytearray(files("BF16").read_bytes())
    at = bytes_.index(b"general.architecture") + len("general.architecture") + 12
    assert bytes_[at:at + 5] == b"llama"
    bytes_[at:at + 5] = b"mamba"
    cut.write_bytes(bytes_)
    refused = run("inspect", "--model", cut, check=False)
    assert refused.returncode == 1 and '"mamba" is not served; served are llama, ' in refused.stderr


def test_kvasir_compress_refuses_a_gguf_file_and_asks_for_a_folder(files):
    tool = BINARY.with_name("kvasir-compress")
    if not tool.exists():
        pytest.skip("no kvasir-compress in this build")
    done = subprocess.run([tool, "plan", "--model", files("BF16"), "--method", "palu", "--keep", "0.5"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "is a GGUF file" in done.stderr and "folder" in done.stderr


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """families("phi3") returns a folder and a GGUF file with the same weights. Each pair is made only once."""
    base, made = tmp_path_factory.mktemp("families"), {}

    def make(family):
        if family not in made:
            folder = gguf_families.make_folder(family, base / family)
            made[family] = folder, gguf_families.make_file(family, folder, base / f"{family}.gguf")
        return made[family]

    return make


@pytest.mark.parametrize("family", gguf_families.FAMILIES)
def test_gguf_files_of_every_family_give_the_tokens_and_the_loss_of_the_folder(families, family):
    flags = ["--kv-dtype", "f32"]
    folder, file = families(family)
    prompt = "It was a bright cold day"
    texts = [run("generate", "--model", model, "--prompt", prompt, "--temperature", 0, "--max-tokens", 40, "--ignore-eos", *flags).stdout
             for model in (folder, file)]
    assert texts[0] == texts[1] and len(texts[0]) > len(prompt)
    losses = [json.loads(run("perplexity", "--model", model, "--text", TINY / "evaluation.txt", "--window", 60, "--max-windows", 3,
                             "--json", *flags).stdout) for model in (folder, file)]
    assert losses[0]["tokens"] == losses[1]["tokens"]
    assert losses[0]["nats_per_byte"] == losses[1]["nats_per_byte"]


@pytest.mark.parametrize("family", gguf_families.FAMILIES)
def test_convert_restores_the_tensors_that_a_gguf_file_was_made_from(families, family, tmp_path):
    folder, file = families(family)
    run("convert", "--gguf", file, "--out", tmp_path / "folder")
    assert gguf_families.stored(tmp_path / "folder") == gguf_families.stored(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe", "phi3"])
def test_convert_writes_quantized_experts_and_fused_matrices_as_bf16_numbers(families, family, tmp_path):
    folder, _ = families(family)
    kind = gguf.GGMLQuantizationType.Q8_0
    gguf_families.make_file(family, folder, tmp_path / "m.gguf", kind)
    run("convert", "--gguf", tmp_path / "m.gguf", "--out", tmp_path / "folder")
    want = gguf_families.unpacked(folder, kind)
    assert want != gguf_families.stored(folder)
    assert gguf_families.stored(tmp_path / "folder") == want


def test_a_model_in_several_gguf_files_is_served_if_the_first_is_named(families, tmp_path):
    folder, file = families("qwen3moe")
    gguf_families.make_file("qwen3moe", folder, tmp_path / "m.gguf", split_max_tensors=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2 and parts[0].name == f"m-00001-of-{len(parts):05}.gguf"
    assert generate(parts[0]) == generate(file)
    report = json.loads(run("inspect", "--model", parts[0], "--json").stdout)
    assert report["served"]
    second = run("inspect", "--model", parts[1], check=False)
    assert second.returncode == 1 and f"give the first, {parts[0]}" in second.stderr
    parts[-1].unlink()
    missing = run("serve", "--model", parts[0], check=False)
    assert missing.returncode == 1 and parts[-1].name in missing.stderr
