"""Tools, structured output, the Responses API and the Messages API through unmodified clients.

Tools are requested by name or with `required`, and schemas bound every string and number, so that a model with random
weights gives answers that can be checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from clients.endpoint import QUESTION, Endpoint, raises

MAX_TOKENS: Final = 1500
"""Ample for every schema here, whatever the model writes."""

Name = Annotated[str, Field(min_length=1, max_length=12)]


class Tag(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["river", "hill", "port"]
    count: int = Field(ge=0, le=99)


class City(BaseModel):
    """Facts about a city."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    inhabitants: int = Field(ge=0, le=99_999)
    size: Literal["large", "small"]
    tags: list[Tag] = Field(max_length=2)


class Size(BaseModel):
    """Size of a city, without limits of numbers and texts."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["large", "small"]
    is_port: bool


class GetWeather(BaseModel):
    """Weather of a city on the next days."""

    model_config = ConfigDict(extra="forbid")
    city: Name
    days: int = Field(ge=1, le=9)


WEATHER: Final[Any] = GetWeather.model_json_schema()
NAMED: Final[Any] = {"type": "function", "function": {"name": "GetWeather"}}


def openai_chats(endpoint: Endpoint) -> str:
    openai = import_module("openai")
    client, model = openai.OpenAI(base_url=endpoint.api, api_key="none", max_retries=0), endpoint.model
    tool = openai.pydantic_function_tool(GetWeather)
    fields = {"model": model, "messages": QUESTION, "max_tokens": MAX_TOKENS}

    parsed = client.chat.completions.parse(**fields, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**fields, **forced)
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather) and called.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**fields, tools=[tool], tool_choice=NAMED) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert streamed.finish_reason == "stop" and len(streamed.message.tool_calls) == 1
    with client.chat.completions.stream(**fields, response_format=City) as stream:
        assert "content.done" in {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*QUESTION, called.choices[0].message, result]
    answer = client.chat.completions.create(model=model, messages=messages, tools=[tool], max_tokens=8)
    assert answer.usage.prompt_tokens > called.usage.prompt_tokens
    invalid = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}}}
    refused = {**fields, "response_format": invalid}
    raises(openai.BadRequestError, lambda: client.chat.completions.create(**refused), "unsupported_schema")
    return "chats: tools, `tool_choice`, `parse` and `stream` with tools and with schemas, errors of schemas"


def openai_responses(endpoint: Endpoint) -> str:
    openai = import_module("openai")
    client, model = openai.OpenAI(base_url=endpoint.api, api_key="none", max_retries=0), endpoint.model
    tool = {"type": "function", **openai.pydantic_function_tool(GetWeather)["function"]}
    fields = {"model": model, "max_output_tokens": MAX_TOKENS}

    assert client.responses.create(model=model, input="Hi", max_output_tokens=4).output_text
    assert isinstance(client.responses.parse(**fields, input="Hi", text_format=City).output_parsed, City)
    with client.responses.stream(**fields, input="Hi", text_format=City) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, City) and "response.output_text.done" in kinds
    question: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
    named = {"type": "function", "name": "GetWeather"}
    with client.responses.stream(**fields, input=question, tools=[tool], tool_choice=named) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    call = final.output[-1]
    assert call.type == "function_call" and GetWeather.model_validate_json(call.arguments)
    assert "response.function_call_arguments.done" in kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(
        model=model, input=[*question, *final.output, result], tools=[tool], max_output_tokens=4
    )
    assert more.usage.input_tokens > final.usage.input_tokens
    stateful = {"model": model, "input": "Hi", "previous_response_id": final.id}
    raises(openai.BadRequestError, lambda: client.responses.create(**stateful), "unsupported_parameter")
    return "responses: `create`, `parse`, `stream`, with tools, with schemas, with results of tools"


def anthropic(endpoint: Endpoint) -> str:
    package = import_module("anthropic")
    client, model = package.Anthropic(base_url=endpoint.url, api_key="none", max_retries=0), endpoint.model
    tool = {"name": "get_weather", "description": "Weather", "input_schema": WEATHER}
    fields = {"model": model, "max_tokens": MAX_TOKENS, "messages": [{"role": "user", "content": "Weather?"}]}

    short = client.messages.create(**{**fields, "max_tokens": 4}, system="Be brief.")
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 4
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}}
    called = client.messages.create(**fields, **forced)
    use = called.content[-1]
    assert (use.type, called.stop_reason) == ("tool_use", "tool_use") and GetWeather.model_validate(use.input)
    with client.messages.stream(**fields, **forced) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert "input_json" in kinds and GetWeather.model_validate(streamed.content[-1].input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [
        *fields["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    with client.messages.stream(model=model, max_tokens=8, messages=turns, tools=[tool]) as stream:
        assert "".join(stream.text_stream) == "".join(
            block.text for block in stream.get_final_message().content if block.type == "text"
        )
    count = client.messages.count_tokens(model=model, messages=turns, tools=[tool])
    assert count.input_tokens > called.usage.input_tokens
    # The client sends no limits of numbers, texts and lists.
    parsed = client.messages.parse(**fields, output_format=Size)
    assert isinstance(parsed.parsed_output, Size)
    raises(
        package.BadRequestError, lambda: client.messages.create(model=model, max_tokens=0, messages=turns), "max_tokens"
    )
    raises(package.NotFoundError, lambda: client.messages.create(**{**fields, "model": "another"}), "model_not_found")
    return "`create`, `stream`, `parse`, `count_tokens`, with tools and their results, errors"


def langchain(endpoint: Endpoint) -> str:
    kind = import_module("langchain_openai").ChatOpenAI
    messages = import_module("langchain_core.messages")
    common = {"base_url": endpoint.api, "api_key": "none", "model": endpoint.model, "max_retries": 0}
    for use_responses in (False, True):
        chat = kind(**common, max_tokens=MAX_TOKENS, use_responses_api=use_responses)
        for method in ("json_schema", "function_calling"):
            answer = chat.with_structured_output(City, method=method).invoke("Tell me of Bonn")
            assert isinstance(answer, City), (method, answer)
        bound = chat.bind_tools([GetWeather], tool_choice="GetWeather")
        called = bound.invoke("Weather in Bonn?")
        (call,) = called.tool_calls
        assert call["name"] == "GetWeather" and GetWeather.model_validate(call["args"])
        joined: Any = None
        for chunk in bound.stream("Weather in Bonn?"):
            joined = chunk if joined is None else joined + chunk
        assert GetWeather.model_validate(joined.tool_calls[0]["args"])
        history = [
            messages.HumanMessage("Weather in Bonn?"),
            called,
            messages.ToolMessage("sunny", tool_call_id=call["id"]),
        ]
        brief = kind(**common, max_tokens=16, use_responses_api=use_responses).bind_tools([GetWeather])
        assert brief.invoke(history).usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]
        raw = chat.with_structured_output(City.model_json_schema(), method="json_schema", include_raw=True)
        assert City.model_validate(raw.invoke("Tell me of Bonn")["parsed"])
    return (
        "`bind_tools`, `with_structured_output` (both methods), streams and results of tools, over chats and responses"
    )


def langchain_anthropic(endpoint: Endpoint) -> str:
    chat = import_module("langchain_anthropic").ChatAnthropic(
        base_url=endpoint.url, api_key="none", model=endpoint.model, max_tokens=MAX_TOKENS, max_retries=0
    )
    messages = import_module("langchain_core.messages")
    called = chat.bind_tools([GetWeather], tool_choice="GetWeather").invoke("Weather in Bonn?")
    (call,) = called.tool_calls
    assert GetWeather.model_validate(call["args"])
    assert isinstance(chat.with_structured_output(City).invoke("Tell me of Bonn"), City)
    history = [messages.HumanMessage("Weather?"), called, messages.ToolMessage("sunny", tool_call_id=call["id"])]
    assert chat.bind_tools([GetWeather]).invoke(history, max_tokens=8).response_metadata
    return "`bind_tools`, `with_structured_output`, results of tools"


def instructor(endpoint: Endpoint) -> str:
    package, openai = import_module("instructor"), import_module("openai")
    client = openai.OpenAI(base_url=endpoint.api, api_key="none", max_retries=0)
    question = [{"role": "user", "content": "Tell me of Bonn"}]
    modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
    for mode in modes:
        limit = "max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"
        wrapped = package.from_openai(client, mode=getattr(package.Mode, mode))
        fields = {"model": endpoint.model, "messages": question, limit: MAX_TOKENS, "max_retries": 0}
        assert isinstance(wrapped.create(response_model=City, **fields), City), mode
    wrapped = package.from_openai(client, mode=package.Mode.TOOLS)
    partial = list(
        wrapped.create_partial(response_model=City, model=endpoint.model, messages=question, max_tokens=MAX_TOKENS)
    )
    assert City.model_validate(partial[-1].model_dump())
    return f"`create` in the modes {', '.join(modes)}; `create_partial`"


def litellm(endpoint: Endpoint) -> str:
    client: Any = import_module("litellm")
    client.suppress_debug_info = True
    tool = {"type": "function", "function": {"name": "GetWeather", "parameters": WEATHER}}
    for provider in ("openai", "hosted_vllm"):
        fields = {
            "model": f"{provider}/{endpoint.model}",
            "api_base": endpoint.api,
            "api_key": "none",
            "max_tokens": MAX_TOKENS,
            "num_retries": 0,
            "messages": QUESTION,
        }
        called = client.completion(**fields, tools=[tool], tool_choice=NAMED).choices[0].message.tool_calls
        assert _has_weather(called[0])
        chunks = list(client.completion(**fields, tools=[tool], tool_choice=NAMED, stream=True))
        built = client.stream_chunk_builder(chunks, messages=QUESTION).choices[0].message.tool_calls
        assert _has_weather(built[0])
        answer = client.completion(**fields, response_format=City).choices[0].message.content
        assert City.model_validate_json(answer)
    fields = {"model": f"openai/{endpoint.model}", "api_base": endpoint.api, "api_key": "none"}
    answer = client.responses(**fields, input="Hi", max_output_tokens=16)
    assert answer.status == "incomplete" and answer.usage.output_tokens == 16
    messages = {"model": f"anthropic/{endpoint.model}", "api_base": endpoint.url, "api_key": "none"}
    answer = client.completion(**messages, messages=QUESTION, max_tokens=MAX_TOKENS, tools=[tool], tool_choice=NAMED)
    assert _has_weather(answer.choices[0].message.tool_calls[0])
    return "`completion` with tools and schemas, plain and streamed, `responses`, and `completion` over Messages"


def _has_weather(call: Any) -> bool:
    """Whether the arguments have both fields. For some providers litellm removes `additionalProperties`, and others
    may then follow."""
    arguments = json.loads(call.function.arguments)
    return isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 9


def pydantic_ai(endpoint: Endpoint) -> str:
    ai = import_module("pydantic_ai")
    openai_models = import_module("pydantic_ai.models.openai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=endpoint.api, api_key="none")
    claude = import_module("pydantic_ai.models.anthropic").AnthropicModel(
        endpoint.model,
        provider=import_module("pydantic_ai.providers.anthropic").AnthropicProvider(
            base_url=endpoint.url, api_key="none"
        ),
    )
    models = [
        openai_models.OpenAIChatModel(endpoint.model, provider=provider),
        openai_models.OpenAIResponsesModel(endpoint.model, provider=provider),
        claude,
    ]
    settings = {"max_tokens": MAX_TOKENS}
    for model in models:
        # Of Anthropic's models it has a list of those that take schemas.
        for output in (City,) if model is claude else (City, ai.NativeOutput(City)):
            agent = ai.Agent(model, output_type=output, model_settings=settings, retries=0)
            assert isinstance(agent.run_sync("Tell me of Bonn").output, City), (model, output)

    async def stream() -> None:
        agent = ai.Agent(models[0], output_type=ai.NativeOutput(City), model_settings=settings, retries=0)
        async with agent.run_stream("Tell me of Bonn") as result:
            assert isinstance(await result.get_output(), City)

    asyncio.run(stream())
    return "`output_type` by tool and by schema, over chats, responses and Messages; `run_stream`"


def llm(endpoint: Endpoint) -> str:
    with tempfile.TemporaryDirectory() as folder:
        entry = {
            "model_id": "served",
            "model_name": endpoint.model,
            "api_base": endpoint.api,
            "supports_tools": True,
            "supports_schema": True,
        }
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))

        def run(*words: str) -> str:
            command = [sys.executable, "-m", "llm", *words, "--key", "none", "-m", "served"]
            environment = {**os.environ, "LLM_USER_PATH": folder}
            return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

        limit = ("-o", "max_tokens", str(MAX_TOKENS))
        schema = json.dumps(City.model_json_schema())
        assert City.model_validate_json(run("Tell me of Bonn", "--schema", schema, *limit))
        assert City.model_validate_json(run("Tell me of Bonn", "--schema", schema, "--no-stream", *limit))
        # Its tools are always `auto`: whether there is a call is up to the model.
        assert run("What is the version?", "-T", "llm_version", "-o", "max_tokens", "8").strip()
    return "prompts with a schema, plain and streamed, and with a tool"


def ai_sdk(endpoint: Endpoint) -> str:
    script = Path(__file__).with_name("ai_sdk.mjs")
    command = ["node", str(script), endpoint.url, endpoint.model]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
