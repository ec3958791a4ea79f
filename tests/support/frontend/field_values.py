"""Values of every field of chats and completions: pairs with different outcomes, and values that are refused."""

from __future__ import annotations

from typing import Any

TOOLS = [{"type": "function", "function": {"name": "f"}}]
PREDICTION = {"type": "content", "content": "Hi"}
DIFFERING: dict[str, tuple[Any, Any]] = {
    "model": (None, "default"),
    "max_tokens": (1, 2),
    "min_tokens": (None, 2),
    "temperature": (0, 1),
    "top_p": (0.5, 1),
    "top_k": (-1, 1),
    "min_p": (0, 0.5),
    "seed": (1, 2),
    "n": (1, 2),
    "stop": (None, "e"),
    "stop_token_ids": ([], [5]),
    "include_stop_str_in_output": (False, True),
    "ignore_eos": (False, True),
    "presence_penalty": (0, 1),
    "frequency_penalty": (0, 1),
    "repetition_penalty": (1, 2),
    "logit_bias": ({}, {"5": 1}),
    "allowed_token_ids": (None, [5]),
    "bad_words": ([], ["e"]),
    "stop_regex": (None, "[ef]"),
    "skip_special_tokens": (True, False),
    "prompt_logprobs": (None, 0),
    "return_token_ids": (False, True),
    "return_tokens_as_token_ids": (False, True),
    "logprob_token_ids": ([], [5]),
    "stream": (False, True),
    "stream_options": (None, {"include_usage": True}),
    "priority": (0, 1),
    "timeout": (None, 100_000),
    "cache_salt": (None, "a"),
    "response_format": ({"type": "text"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    "structured_outputs": ({"regex": "a"}, {"regex": "b"}),
    "json_schema": ('{"type": "integer"}', {"type": "string"}),
    "regex": (None, "a+"),
    "ebnf": (None, 'root ::= "a"'),
    "structural_tag": (None, {"format": {"type": "any_text"}}),
    "guided_json": (None, {}),
    "guided_regex": (None, "a+"),
    "guided_choice": (["a"], ["a", "b"]),
    "guided_grammar": (None, 'root ::= "a"'),
    "truncate_prompt_tokens": (None, 1),
    "truncation_side": ("left", "right"),
}
DIFFERING_CHAT = DIFFERING | {
    "messages": ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]),
    "max_completion_tokens": (1, 2),
    "logprobs": (False, True),
    "top_logprobs": (0, 2),
    "chat_template_kwargs": ({}, {"note": "x"}),
    "documents": ([], [{"title": "a", "text": "b"}]),
    "tools": ([], TOOLS),
    "reasoning_effort": ("low", "high"),
    "enable_thinking": (True, False),
    "add_generation_prompt": (True, False),
    "continue_final_message": (False, True),
    "echo": (False, True),
    "prediction": (None, PREDICTION),
}
NOT_AT_THE_SCHEDULER: dict[str, tuple[Any, Any]] = {"add_special_tokens": (True, False)}
NOT_AT_THE_SCHEDULER_CHAT = NOT_AT_THE_SCHEDULER | {
    "tool_choice": ("auto", "required"),
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
    "include_reasoning": (True, False),
    "thinking_token_budget": (1, 2),
    "thinking_budget": (None, 0),
}
"""Pairs that must differ in the request to a tokenizer worker or in the form of the response; not every template,
tokenizer or answer shows it."""
DIFFERING_COMPLETION = DIFFERING | {
    "prompt": ("Hi", [5, 6]),
    "logprobs": (None, 0),
    "echo": (False, True),
}
NEEDED: dict[str, dict[str, Any]] = {
    "include_stop_str_in_output": {"stop": "e"},
    "skip_special_tokens": {"include_stop_str_in_output": True},
    "return_tokens_as_token_ids": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 1},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "echo": {"messages": [{"role": "assistant", "content": "On"}]},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}
"""Other fields that a body needs for a field to have an effect."""

NEEDED_COMPLETION = NEEDED | {
    "return_tokens_as_token_ids": {"logprobs": 0},
    "logprob_token_ids": {"logprobs": 0},
    "echo": {},
}

REFUSED: dict[str, tuple[Any, Any]] = {
    "guided_whitespace_pattern": (None, " "),
    "best_of": (1, 2),
    "use_beam_search": (False, True),
    "lora_path": (None, "adapter"),
    "logits_processors": ([], ["a.b"]),
    "custom_logit_processor": (None, "{}"),
    "repetition_detection": (None, {}),
    "return_hidden_states": (False, True),
    "no_stop_trim": (False, True),
    "moderation": (None, {"model": "m"}),
    "compaction": (None, {"type": "auto"}),
    "context_management": ([], [{"type": "compaction"}]),
    "thread": (None, {"id": "t"}),
    "fallbacks": ([], ["other"]),
    "kv_transfer_params": ({}, {"do_remote_decode": True}),
}
REFUSED_CHAT = REFUSED | {
    "chat_template": (None, "{{ messages }}"),
    "prompt": ("", "Hi"),
    "prompt_token_ids": ([], [5]),
    "prompt_embeds": ([], ["x"]),
    "stream_reasoning": (True, False),
    "functions": ([], [{"name": "f"}]),
    "function_call": ("none", {"name": "f"}),
    "suffix": ("", "x"),
    "verbosity": ("medium", "low"),
    "modalities": (["text"], ["text", "audio"]),
    "audio": (None, {"voice": "a"}),
    "web_search_options": (None, {}),
}
REFUSED_COMPLETION = REFUSED | {
    "prediction": (None, PREDICTION),
    "suffix": (None, "x"),
    "prompt_embeds": ([], ["x"]),
    "messages": ([], [{"role": "user", "content": "Hi"}]),
    "max_completion_tokens": (None, 5),
    "top_logprobs": (0, 2),
    "tools": ([], TOOLS),
    "tool_choice": ("auto", "required"),
    "reasoning_effort": (None, "high"),
    "enable_thinking": (None, False),
    "thinking_token_budget": (-1, 5),
    "thinking_budget": (-1, 0),
    "separate_reasoning": (False, True),
    "include_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "chat_template": (None, "{{ messages }}"),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "documents": ([], [{"title": "a", "text": "b"}]),
    "add_generation_prompt": (False, True),
    "continue_final_message": (False, True),
    "prompt_token_ids": ([], [5]),
    "functions": ([], [{"name": "f"}]),
    "function_call": ("none", {"name": "f"}),
    "verbosity": ("medium", "high"),
    "modalities": (["text"], ["text", "audio"]),
    "audio": (None, {"voice": "a"}),
    "web_search_options": (None, {}),
}
"""Pairs of a value that asks for nothing, and one that would change the response."""

WITHOUT_EFFECT: dict[str, tuple[Any, Any]] = {
    "user": ("me", 5),
    "metadata": ({"a": "b"}, "b"),
    "store": (True, "yes"),
    "service_tier": ("auto", 1),
    "safety_identifier": ("x", []),
    "prompt_cache_key": ("k", 1),
    "spaces_between_special_tokens": (True, "yes"),
}
"""Pairs of a value that is accepted, and one of a wrong type."""
WITHOUT_EFFECT_COMPLETION = WITHOUT_EFFECT | {"parallel_tool_calls": (False, "yes")}
