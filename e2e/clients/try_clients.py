"""Run unmodified OpenAI clients against a running server, and print a table of their versions and tested features.

    pip install openai anthropic langchain-openai langchain-anthropic instructor litellm mcp \
        'pydantic-ai-slim[openai,anthropic]' llm 'lm-eval[api]'
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
    minisgl serve MODEL --port 8000
    PYTHONPATH=e2e python -m clients.try_clients http://127.0.0.1:8000

The exit code is 1 if a client is not installed or fails. Some of these packages need different versions of others: name
the clients of one environment behind the URL. Most answers are cut after a few tokens: serve a model that thinks with
`--reasoning-parser none`, else they have reasoning and no text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from clients import agents
from clients.endpoint import QUESTION, TOO_LONG, Endpoint, raises

# litellm would download a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def openai_sync(endpoint: Endpoint) -> str:
    client = import_module("openai").OpenAI(base_url=endpoint.api, api_key="none", max_retries=0)
    model = endpoint.model
    assert client.models.retrieve(model).id == model

    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": model, "messages": QUESTION, "max_tokens": 12, **fields})

    greedy = ask(temperature=0)
    answer = greedy.choices[0].message.content
    assert greedy.usage.total_tokens == greedy.usage.prompt_tokens + greedy.usage.completion_tokens

    choices = ask(n=3, seed=5, temperature=1.5, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in choices.choices] == [0, 1, 2]
    for choice in choices.choices:
        scored = choice.logprobs.content
        spelled = b"".join(bytes(token.bytes) for token in scored).decode(errors="replace")
        assert spelled == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in scored)
    again = ask(seed=5, temperature=1.5)
    assert again.choices[0].message.content == choices.choices[0].message.content

    stopped = ask(temperature=0, stop=answer[2:4])
    assert stopped.choices[0].message.content == answer[: answer.index(answer[2:4])]
    assert stopped.choices[0].finish_reason == "stop"

    events = list(ask(temperature=0, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True))
    streamed = {0: "", 1: ""}
    for event in events:
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == {0: answer, 1: answer}
    assert events[-1].usage.prompt_tokens == greedy.usage.prompt_tokens

    text = client.completions.create(model=model, prompt="A page", max_tokens=4, echo=True, logprobs=1, n=2, seed=1)
    for choice in text.choices:
        assert choice.text.startswith("A page")
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    stream = client.completions.create(model=model, prompt="A page", max_tokens=4, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in stream)

    openai = import_module("openai")
    raises(openai.BadRequestError, lambda: ask(messages=TOO_LONG), "context_length_exceeded")
    raises(openai.NotFoundError, lambda: ask(model="another"), "model_not_found")
    return "models, chat and completions: plain, stream, n, logprobs, echo, stop, seed, usage, errors"


def openai_async(endpoint: Endpoint) -> str:
    async def main() -> None:
        async with import_module("openai").AsyncOpenAI(base_url=endpoint.api, api_key="none") as client:
            fields = {"model": endpoint.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
            answers = await asyncio.gather(*[client.chat.completions.create(**fields) for _ in range(8)])
            texts = {answer.choices[0].message.content for answer in answers}
            streamed = ""
            async for event in await client.chat.completions.create(**fields, stream=True):
                streamed += event.choices[0].delta.content or ""
            assert texts == {streamed}

    asyncio.run(main())
    return "8 chats at a time, stream"


def langchain(endpoint: Endpoint) -> str:
    chat = import_module("langchain_openai").ChatOpenAI(
        base_url=endpoint.api, api_key="none", model=endpoint.model, temperature=0, max_tokens=12, max_retries=0
    )
    answer = chat.invoke("What is a page?")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream("What is a page?")) == answer.content
    assert asyncio.run(chat.ainvoke("What is a page?")).content == answer.content
    overflow = import_module("langchain_core.exceptions").ContextOverflowError
    raises(overflow, lambda: chat.invoke(TOO_LONG[0]["content"]), "context")
    return "invoke, ainvoke, stream, ContextOverflowError"


def litellm(endpoint: Endpoint) -> str:
    client: Any = import_module("litellm")
    client.suppress_debug_info = True
    for provider in ("openai", "hosted_vllm"):
        fields = {
            "model": f"{provider}/{endpoint.model}",
            "api_base": endpoint.api,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 12,
            "num_retries": 0,
        }
        answer = client.completion(messages=QUESTION, **fields)
        text = answer.choices[0].message.content
        assert text and answer.usage.completion_tokens > 0
        events = client.completion(messages=QUESTION, stream=True, **fields)
        assert "".join(event.choices[0].delta.content or "" for event in events) == text
        too_long = partial(client.completion, messages=TOO_LONG, **fields)
        raises(client.ContextWindowExceededError, too_long, "context")
    return "completion and stream as openai/ and hosted_vllm/, ContextWindowExceededError"


def lm_eval(endpoint: Endpoint) -> str:
    import_module("lm_eval.models.openai_completions")
    instance = import_module("lm_eval.api.instance").Instance
    model = import_module("lm_eval.api.registry").get_model("local-completions")(
        model=endpoint.model,
        base_url=f"{endpoint.api}/completions",
        tokenizer_backend="remote",
        max_length=256,
        batch_size=2,
        max_gen_toks=8,
        max_retries=1,
    )

    def ask(kind: str, arguments: list[tuple[Any, ...]]) -> Any:
        asked = [
            instance(request_type=kind, doc={}, arguments=one, idx=i, metadata=("", i, 1))
            for i, one in enumerate(arguments)
        ]
        return getattr(model, kind)(asked, disable_tqdm=True)

    scores = ask("loglikelihood", [("A page", " is"), ("A page", " of the house"), ("", "A page")])
    assert all(math.isfinite(score) and score <= 0 and isinstance(greedy, bool) for score, greedy in scores)
    rolling = ask("loglikelihood_rolling", [("A page is a block of tokens.",)])
    assert math.isfinite(rolling[0])
    options = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    assert all(isinstance(text, str) for text in ask("generate_until", [("A page", options), ("The house", options)]))
    return "local-completions with the remote tokenizer: loglikelihood, loglikelihood_rolling, generate_until"


TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def lm_eval_tasks(endpoint: Endpoint) -> str:
    """Evaluate a task of local files with the command, as users do."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.jsonl"
        questions.write_text('{"question": "What is a page?", "answer": "A page"}\n' * 3)
        (Path(folder) / "task.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
        for model, path, options in (
            ("local-completions", "completions", ["tokenizer_backend=remote", "max_length=256"]),
            ("local-chat-completions", "chat/completions", []),
        ):
            arguments = [f"model={endpoint.model}", f"base_url={endpoint.api}/{path}", "max_retries=1", *options]
            command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", ",".join(arguments)]
            command += ["--include_path", folder, "--tasks", "local"]
            command += ["--apply_chat_template"] if "chat" in model else []
            done = subprocess.run(command, check=False, env=os.environ | offline, capture_output=True, text=True)
            assert done.returncode == 0 and "exact_match" in done.stdout, done.stderr[-2000:]
    return "tasks of local files through local-completions and local-chat-completions"


def curl(endpoint: Endpoint) -> str:
    body = json.dumps({"model": endpoint.model, "messages": QUESTION, "max_tokens": 4, "stream": True})
    command = ["curl", "-sSN", "--fail", f"{endpoint.api}/chat/completions", "-H", "Content-Type: application/json"]
    shown = subprocess.run([*command, "-d", body], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("data: [DONE]\n\n")
    # For a body of more than 1 MiB, curl sends Expect: 100-continue first.
    padded = json.dumps({"messages": QUESTION, "max_tokens": 4, "metadata": {"x": "x" * 2**21}})
    plain = subprocess.run([*command, "-d", "@-"], input=padded, capture_output=True, text=True, check=True).stdout
    assert json.loads(plain)["object"] == "chat.completion"
    return "chat, plain and stream, Expect: 100-continue"


CLIENTS: list[tuple[str, str, Callable[[Endpoint], str]]] = [
    ("openai", "openai", openai_sync),
    ("openai", "openai", openai_async),
    ("openai", "openai", agents.openai_chats),
    ("openai", "openai", agents.openai_responses),
    ("anthropic", "anthropic", agents.anthropic),
    ("langchain-openai", "langchain-openai", langchain),
    ("langchain-openai", "langchain-openai", agents.langchain),
    ("langchain-anthropic", "langchain-anthropic", agents.langchain_anthropic),
    ("instructor", "instructor", agents.instructor),
    ("litellm", "litellm", litellm),
    ("litellm", "litellm", agents.litellm),
    ("pydantic-ai", "pydantic-ai-slim", agents.pydantic_ai),
    ("llm", "llm", agents.llm),
    ("lm-eval", "lm_eval", lm_eval),
    ("lm-eval", "lm_eval", lm_eval_tasks),
    ("ai-sdk", "npm:ai", agents.ai_sdk),
    ("curl", "", curl),
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run unmodified clients against a running server.")
    parser.add_argument("url", help="URL of the server, such as http://127.0.0.1:8000")
    parser.add_argument("clients", nargs="*", help="names of clients (default: all)", metavar="CLIENT")
    args = parser.parse_args()
    endpoint = Endpoint(args.url)
    print("| client | version | tested |\n|---|---|---|")
    failed = 0
    for name, package, run in CLIENTS:
        if args.clients and name not in args.clients:
            continue
        version = _version(package)
        if version is None:
            print(f"| {name} | not installed | |", flush=True)
            failed += 1
            continue
        try:
            tested = run(endpoint)
        except Exception:
            traceback.print_exc()
            tested = "FAILED"
            failed += 1
        print(f"| {name} | {version} | {tested} |", flush=True)
    return 1 if failed else 0


def _version(package: str) -> str | None:
    if package.startswith("npm:"):
        manifest = Path("node_modules", package.removeprefix("npm:"), "package.json")
        return str(json.loads(manifest.read_text())["version"]) if manifest.exists() else None
    if package:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
    if shutil.which("curl") is None:
        return None
    return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


if __name__ == "__main__":
    sys.exit(main())
