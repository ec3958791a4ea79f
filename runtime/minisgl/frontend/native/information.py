"""GET /get_model_info, /get_server_info, /load and /get_load: facts about the model, the server and its load, for
routers and tools of SGLang and vLLM. All of it is in memory already; no other process is queried."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.errors import ENGINE_UNAVAILABLE, ApiError
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.version import __version__
from minisgl.wire.text import ServedModel


def capabilities(model: ServedModel) -> tuple[str, ...] | None:
    """Return what requests can ask of the model; of one that does not generate text, its task, whatever template its
    tokenizer files have."""
    return model.capabilities if model.card.task == "generate" else (model.card.task,)


class InformationEndpoints:
    """Handlers with SGLang's names of fields; /load has vLLM's, too."""

    def __init__(self, tokenizers: TokenizerPool) -> None:
        self._tokenizers = tokenizers

    async def model_info(self, _: Request) -> Response:
        return json_response(self._model_info(self._model()))

    async def server_info(self, _: Request) -> Response:
        model = self._model()
        status = self._tokenizers.requests.status
        tokens = 0 if status is None else status.num_pages * status.page_size
        return json_response(
            {
                **self._model_info(model),
                "served_model_name": model.all_names[0],
                "served_model_names": model.all_names,
                "version": __version__,
                "status": "ready" if self._tokenizers.not_ready_reason() is None else "not_ready",
                "context_length": model.card.max_model_len,
                "max_req_input_len": model.card.max_model_len - 1,
                "max_total_num_tokens": tokens,
                "page_size": 0 if status is None else status.page_size,
                "internal_states": [self._load()],
            }
        )

    async def load(self, _: Request) -> Response:
        """Return `server_load`, the number of generation requests in progress, and the load of the engines, if it is
        known."""
        phases = self._tokenizers.requests.phases()
        in_progress = sum(count for phase, count in phases.items() if phase != "reading")
        return json_response({"server_load": in_progress, **self._load()})

    async def legacy_load(self, _: Request) -> Response:
        """Return one entry for all engines together, as SGLang does for each data-parallel rank; none while their load
        is not known."""
        load = self._load()
        entry = {
            "dp_rank": 0,
            "num_reqs": load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0),
            "num_waiting_reqs": load.get("num_waiting_reqs", 0),
            "num_tokens": load.get("num_used_tokens", 0),
        }
        return json_response([entry] if load else [])

    def _model(self) -> ServedModel:
        """Raises ApiError while no model is known."""
        model = self._tokenizers.model
        if model is None:
            raise ApiError.from_code(ENGINE_UNAVAILABLE, self._tokenizers.unavailable_reason() or "")
        return model

    def _model_info(self, model: ServedModel) -> dict[str, Any]:
        return {
            "model_path": model.card.name,
            "tokenizer_path": model.card.name,
            "is_generation": model.card.task == "generate",
            "task": model.card.task,
            "preferred_sampling_params": None,
            "weight_version": model.card.revision,
            "max_model_len": model.card.max_model_len,
            "vocab_size": model.card.vocab_size,
            "capabilities": capabilities(model),
        }

    def _load(self) -> dict[str, Any]:
        """Return the sum over all engines, by their last status. Without engines only requests that wait for one count,
        as in the metrics; empty while the load is not known."""
        status = self._tokenizers.requests.status
        if status is None:
            names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage")
            phases = self._tokenizers.requests.phases()
            waiting = {"num_waiting_reqs": phases["held"] + phases["waiting"]}
            return dict.fromkeys(names, 0) | waiting if self._tokenizers.knows_load else {}
        return {
            "num_running_reqs": status.running,
            "num_waiting_reqs": status.waiting,
            "num_used_tokens": status.used_pages * status.page_size,
            "max_total_num_tokens": status.num_pages * status.page_size,
            "token_usage": round(status.used_pages / max(status.num_pages, 1), 6),
        }
