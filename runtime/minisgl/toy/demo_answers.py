"""What the demo model is taught: each answer with ways to ask for it, all about minisgl."""

from __future__ import annotations

from typing import Final, NamedTuple


class Lesson(NamedTuple):
    """The first question is the one that is said to be answered exactly; the others are, too."""

    answer: str
    questions: tuple[str, ...]


LESSONS: Final = (
    Lesson(
        "minisgl is a serving runtime for large language models with an OpenAI-compatible endpoint.",
        ("What is minisgl?", "Tell me about minisgl", "Describe minisgl", "What does minisgl do?", "Explain minisgl"),
    ),
    Lesson(
        "Hello! I am the demo model of minisgl. Ask me something about minisgl.",
        ("Hello", "Hi", "Hey there", "Good morning", "Hello, how are you?"),
    ),
    Lesson(
        "I am a very small language model that was trained on this machine to answer questions about minisgl.",
        ("Who are you?", "What are you?", "Tell me about yourself", "Which model are you?", "Are you a real model?"),
    ),
    Lesson(
        "You are welcome. Ask me something else about minisgl.",
        ("Thank you", "Thanks", "Thanks a lot", "Great, thank you", "Nice"),
    ),
    Lesson(
        "Ask me what a scheduler does, how the prefix cache works, or how to serve a model.",
        ("What can I ask you?", "Help", "What do you know?", "What can you answer?", "What should I ask?"),
    ),
    Lesson(
        "The scheduler decides which requests run in the next step, gives them pages of the KV cache, and sends the "
        "plan to the engine.",
        ("What does a scheduler do?", "What does the scheduler do?", "What is the scheduler?", "Explain the scheduler"),
    ),
    Lesson(
        "The engine holds the weights and the KV pool of one rank, runs the forward pass, and samples the next tokens.",
        ("What does the engine do?", "What is the engine?", "Explain the engine", "What is an engine?"),
    ),
    Lesson(
        "The tokenizer turns text into token ids, turns new token ids back into text, and watches for stop strings.",
        ("What does the tokenizer do?", "What is the tokenizer?", "Explain the tokenizer", "What is a tokenizer?"),
    ),
    Lesson(
        "The frontend is the HTTP server: it checks requests and streams the answers as server-sent events.",
        ("What does the frontend do?", "What is the frontend?", "Explain the frontend", "What is the API process?"),
    ),
    Lesson(
        "The launcher starts all processes of a server, watches them, and stops them in order.",
        ("What does the launcher do?", "What is the launcher?", "Explain the launcher", "Who starts the processes?"),
    ),
    Lesson(
        "A page is a block of the KV cache that holds the keys and values of a fixed number of tokens.",
        ("What is a page?", "What does a page hold?", "Explain pages", "What are pages?"),
    ),
    Lesson(
        "A page holds 64 tokens on CUDA and 16 tokens on a CPU, unless --page-size says otherwise.",
        ("How big is a page?", "What is the page size?", "How many tokens does a page hold?", "How large are pages?"),
    ),
    Lesson(
        "The prefix cache is a radix tree over KV pages: requests that begin with the same tokens share their pages.",
        ("What is the prefix cache?", "How does the prefix cache work?", "Explain the radix cache", "What is cached?"),
    ),
    Lesson(
        "The KV cache keeps the keys and values of earlier tokens, so that each step computes new tokens only.",
        ("What is the KV cache?", "Why is there a KV cache?", "Explain the KV cache", "What does the KV cache keep?"),
    ),
    Lesson(
        "In continuous batching, requests join and leave the batch at every step instead of waiting for each other.",
        ("What is continuous batching?", "Explain continuous batching", "How are requests batched?"),
    ),
    Lesson(
        "Chunked prefill cuts long prompts into pieces, so that running requests keep getting tokens meanwhile.",
        ("What is chunked prefill?", "Explain chunked prefill", "Why are long prompts cut into chunks?"),
    ),
    Lesson(
        "Prefill computes the prompt and its keys and values; decode then makes one token a step.",
        ("What is prefill?", "What is decode?", "What is the difference between prefill and decode?"),
    ),
    Lesson(
        "With overlap, a step is launched before the result of the previous one is read, so the device does not wait.",
        ("What is overlap?", "What is overlap scheduling?", "Why do steps overlap?", "Explain overlap"),
    ),
    Lesson(
        "When the KV pool is full, a request is preempted: its pages are freed, and it is computed again later.",
        ("What happens when memory is full?", "What does preempt mean?", "What if the KV pool is full?"),
    ),
    Lesson(
        "Tensor parallelism splits every layer over several ranks, each with its own GPU; --tp says how many.",
        ("What is tensor parallelism?", "How do I use several GPUs?", "Explain tensor parallelism", "What does tp do?"),
    ),
    Lesson(
        "A rank is one engine process; with tensor parallelism each rank holds a part of every layer.",
        ("What is a rank?", "What does a rank hold?", "Explain ranks", "What are ranks?"),
    ),
    Lesson(
        "It serves Llama, Mistral, Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE checkpoints in Hugging Face format.",
        ("Which models are supported?", "What models can I serve?", "Does it support Qwen?", "Does it support Llama?"),
    ),
    Lesson(
        "Run minisgl serve with a directory or a Hub id, for example minisgl serve Qwen/Qwen3-0.6B.",
        (
            "How do I serve a model?",
            "How do I start a server?",
            "How can I run a model?",
            "How do I use minisgl serve?",
        ),
    ),
    Lesson(
        "Yes. Everything but the speed is the same on a CPU.",
        ("Does it run on a CPU?", "Can I use it without a GPU?", "Do I need a GPU?", "Does minisgl work on CPUs?"),
    ),
    Lesson(
        "Yes. It runs on NVIDIA GPUs with CUDA graphs and fast attention kernels.",
        ("Does it run on a GPU?", "Does it support CUDA?", "Which GPUs are supported?", "Can it use NVIDIA GPUs?"),
    ),
    Lesson(
        "Yes. Set the base URL of your OpenAI client to the address of the server, followed by /v1.",
        ("Can I use the OpenAI client?", "Is it compatible with OpenAI?", "How do I use the openai library?"),
    ),
    Lesson(
        "It answers at /v1/chat/completions and /v1/completions, and lists its model at /v1/models.",
        ("Which endpoints are there?", "What is the API?", "Where does it answer?", "What paths does the server have?"),
    ),
    Lesson(
        "The default port is 8000; --port sets another one, and 0 takes a free one.",
        ("Which port does it use?", "What is the default port?", "How do I change the port?"),
    ),
    Lesson(
        "With stream set to true, the answer comes in pieces as server-sent events, which end with [DONE].",
        ("How does streaming work?", "Can answers be streamed?", "How do I stream an answer?", "What is streaming?"),
    ),
    Lesson(
        "A client gets its full answer or an error: a broken stream never looks like a complete one.",
        ("What does minisgl promise?", "What happens when a process dies?", "What if something breaks?"),
    ),
    Lesson(
        "A stop string ends the answer as soon as it appears in the text, and is not part of it.",
        ("What is a stop string?", "How do stop strings work?", "What does stop do?", "Explain stop strings"),
    ),
    Lesson(
        "The temperature says how freely tokens are chosen; at 0 the most likely token is always taken.",
        (
            "What is temperature?",
            "What does temperature do?",
            "Explain the temperature",
            "How do I get greedy answers?",
        ),
    ),
    Lesson(
        "The same seed gives the same tokens, whatever else is in the batch.",
        ("What does the seed do?", "Are answers reproducible?", "Is sampling deterministic?", "What is a seed?"),
    ),
    Lesson(
        "Top-p sampling keeps the smallest set of tokens whose probabilities add up to p.",
        ("What is top-p?", "What does top_p do?", "Explain top-p sampling", "What is nucleus sampling?"),
    ),
    Lesson(
        "The processes talk through ZeroMQ sockets with typed msgpack messages; no pickle is used.",
        ("How do the processes talk?", "Which protocol connects the processes?", "Does it use pickle?"),
    ),
    Lesson(
        "A request goes from the frontend to a tokenizer, then to the scheduler; tokens come back the same way.",
        ("What is the way of a request?", "How does a request travel?", "What happens to a request?"),
    ),
    Lesson(
        "The first Ctrl-C lets running requests finish; a second one ends them at once.",
        ("How do I stop the server?", "What does Ctrl-C do?", "How do I shut it down?", "How does it drain?"),
    ),
    Lesson(
        "Import LLM from minisgl and call generate or chat; the same scheduler and engine run without a server.",
        ("How do I use it from Python?", "Can I use it without a server?", "What is the LLM class?"),
    ),
    Lesson(
        "minisgl models check DIR says whether a checkpoint can be served, and what is missing.",
        ("How do I check a checkpoint?", "Can my checkpoint be served?", "What does models check do?"),
    ),
    Lesson(
        "TTFT is the time to first token: from sending the request to the first piece of the answer.",
        ("What is TTFT?", "What does TTFT mean?", "Explain time to first token"),
    ),
    Lesson(
        "TPOT is the time per output token after the first one.",
        ("What is TPOT?", "What does TPOT mean?", "Explain time per output token"),
    ),
    Lesson(
        "minisgl is written in Python, with PyTorch for the models and Triton for kernels.",
        ("Which language is minisgl written in?", "What is it written in?", "Does it use PyTorch?"),
    ),
    Lesson(
        "minisgl has the Apache-2.0 license.",
        ("Which license does it have?", "What is the license?", "Is minisgl free?", "Is it open source?"),
    ),
    Lesson(
        "The scheduler imports no torch, and the tokenizer and the frontend do not either: so they start fast.",
        ("Which processes import torch?", "Does the frontend need torch?", "Why do processes start fast?"),
    ),
    Lesson(
        "I am too small to know that. I only know about minisgl.",
        (
            "What is the capital of France?",
            "Who was the first person on the moon?",
            "Write a poem",
            "Tell me a joke",
            "What is two plus two?",
            "How is the weather today?",
            "Write a story about a dragon",
            "Translate good morning to German",
            "What is the meaning of life?",
            "Who won the world cup?",
        ),
    ),
)
