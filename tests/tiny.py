"""Tiny verifiers on disk, with a real tokenizer and a ChatML template, for the tests of every stage.

`tiny_verifier(tmp_path / "v")` makes a Hugging Face directory of about 600 KB within 0.1 s. The weights are
random and seeded, so that two calls with the same options give the same bytes.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Ids 0, 1, 2; the last one ends a turn."""

END_OF_TURN_ID = 2

TOKENIZER_SIZE = 320
"""Ids of the trained tokenizer: 3 special tokens, 256 bytes and the first merges."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog and runs into the forest.",
    "What is the capital of France? The capital of France is Paris.",
    "Write a short story about a river, a boat and the people who live there.",
    "How many days are there in a week? There are seven days in a week.",
    "Explain how a compiler turns source code into machine code, step by step.",
    "Please list three things that I should bring on a walk in the mountains.",
]


def tiny_tokenizer(*, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `TOKENIZER_SIZE` ids: any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE, tokenizer.get_vocab_size()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def tiny_config(
    *,
    family: str = "llama",
    tied: bool = True,
    layers: int = 7,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    vocab_size: int = TOKENIZER_SIZE,
    max_positions: int = 512,
    rope_theta: float = 10000.0,
    initializer_range: float = 0.25,
):
    """The text config of a tiny verifier; head_dim None means hidden / heads."""
    return AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=END_OF_TURN_ID,
    )


def nested_config(text_config):
    """A vision-language wrapper (Llava) around the text config, with a minimal vision tower."""
    vision = AutoConfig.for_model(
        "clip_vision_model",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    return AutoConfig.for_model(
        "llava",
        text_config=text_config,
        vision_config=vision,
        vision_feature_layer=-1,
        image_token_index=0,
        tie_word_embeddings=text_config.tie_word_embeddings,
    )


def tiny_verifier(
    directory: Path,
    *,
    nested: bool = False,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    chat_template: str | None = CHATML,
    **options,
) -> Path:
    """Writes a tiny verifier into `directory` and returns it.

    options (see `tiny_config`): family ("llama", "qwen3" …), tied, layers, hidden, heads, kv_heads, head_dim,
    intermediate, vocab_size (of the config; the tokenizer always has `TOKENIZER_SIZE` ids), max_positions,
    rope_theta, initializer_range (0.25 writes chaotic text, 0.1 repeats itself enough to be learned in seconds).
    sharded: several weight files and an index; nested: a Llava wrapper around the text model.
    """
    directory = Path(directory)
    config = tiny_config(**options)
    factory = AutoModelForCausalLM
    if nested:
        config, factory = nested_config(config), AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config).to(dtype)
    model.save_pretrained(directory, max_shard_size="64KB" if sharded else "5GB")
    tiny_tokenizer(chat_template=chat_template).save_pretrained(directory)
    return directory


def edit_json(path: Path, **changes) -> None:
    """Overwrites keys of a JSON file (a value of None removes the key): for tests with damaged configs."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2), encoding="utf-8")
