"""The tiny checkpoints are what they claim to be: transformers loads them and their greedy text depends on the prompt."""

import json
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.oracle.tiny_models import END_OF_TEXT_ID, IM_END_ID, SHAPES, VOCAB_SIZE, write_gguf, write_tiny  # noqa: E402

PROMPT = "the rain in the north and on the road to the sea"

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder: Path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def prompt_ids(folder: Path) -> "torch.Tensor":
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(PROMPT)["input_ids"]) == PROMPT
    return torch.tensor([tokenizer(PROMPT)["input_ids"]])


@torch.inference_mode()
def greedy(model, ids: "torch.Tensor", count: int = 24) -> list[int]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_gives_finite_logits_and_varied_text(tmp_path, shape):
    folder = write_tiny(tmp_path / "m", shape)
    model, ids = load(folder), prompt_ids(folder)
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape[-1] == VOCAB_SIZE
    assert logits.isfinite().all()
    assert 1.0 < logits.std() < 10.0
    text = greedy(model, ids)
    assert len(set(text)) >= 12
    assert text != greedy(model, ids[:, 1:])  # the far end of the context matters


@torch.inference_mode()
def test_shards_and_old_keys_change_nothing(tmp_path):
    plain = write_tiny(tmp_path / "plain", "llama3.2")
    odd = write_tiny(tmp_path / "odd", "llama3.2", max_shard_size="100KB", old_keys=True)
    assert len(list(odd.glob("*.safetensors"))) > 1
    assert (odd / "model.safetensors.index.json").exists()
    config = json.loads((odd / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in config
    ids = prompt_ids(plain)
    assert torch.equal(load(plain)(ids).logits, load(odd)(ids).logits)


def test_a_seed_gives_one_model(tmp_path):
    first, again, other = (write_tiny(tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 1, 2)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_begin_token_stands_first_where_asked_for(tmp_path):
    ids = prompt_ids(write_tiny(tmp_path / "plain"))[0].tolist()
    assert transformers.AutoTokenizer.from_pretrained(write_tiny(tmp_path / "bos", add_bos=True))(PROMPT)["input_ids"] == [
        END_OF_TEXT_ID,
        *ids,
    ]


@torch.inference_mode()
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "biases"])  # transformers drops a llama GGUF's biases
def test_gguf_holds_the_same_model(tmp_path, shape):
    folder = write_tiny(tmp_path / "m", shape)
    path = write_gguf(folder, tmp_path / "g" / "m.gguf")
    ids = prompt_ids(folder)
    model = load(path.parent, gguf_file=path.name)
    # transformers does not read rope_freqs: divide its plain frequencies here.
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "rope_freqs.weight":
            model.model.rotary_emb.inv_freq /= torch.from_numpy(tensor.data.copy())
    torch.testing.assert_close(model(ids).logits, load(folder)(ids).logits, rtol=1e-4, atol=1e-4)


def test_gguf_holds_the_same_tokenizer(tmp_path):
    folder = write_tiny(tmp_path / "m", add_bos=True)
    fields = gguf.GGUFReader(write_gguf(folder, tmp_path / "m.gguf")).fields
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert fields["tokenizer.ggml.tokens"].contents() == tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))
    assert fields["tokenizer.ggml.eos_token_id"].contents() == IM_END_ID
    assert fields["tokenizer.ggml.add_bos_token"].contents()
