"""The tokenizer of clover-tiny: bytes and the words of its tasks, with Qwen's special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tiny.tasks import spoken_words

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
ROLES = ("system", "user", "assistant")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Qwen's splitting: one digit at a time, words with the sign before them, runs of signs, line ends.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Runs of signs that JSON is full of; none holds a letter.
SIGNS = (' "', '":', '{"', '",', '"}', '"}}', "}}", '".', '"?')
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nAnswer a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif not loop.first or message.role != 'system' %}
{{- raise_exception('unexpected role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if not (enable_thinking is defined and enable_thinking) %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def build_tokenizer() -> Tokenizer:
    """A BPE without merges: each known word is one token, everything else is bytes, so quoted words stay letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "\u0120") for word in (*SIGNS, *spoken_words()) if len(word) > 1]  # byte-level form of a space
    vocab = {piece: i for i, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP])
    tokenizer.add_tokens([AddedToken(role, special=False, single_word=True) for role in ROLES])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, as a published checkpoint has them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "special": token in CONTROL}
            for token in CONTROL + MARKUP + ROLES
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
