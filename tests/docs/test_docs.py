"""Documentation that cannot be checked goes stale: what it names must be there."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from minisgl.cli.main import build_parser, main
from minisgl.flags.foreign import FOREIGN, MINI_SGLANG
from minisgl.frontend import errors
from minisgl.frontend.anthropic.bodies import MessagesBody
from minisgl.frontend.native.bodies import NativeBody, NativeSampling
from minisgl.frontend.openai import bodies
from minisgl.frontend.responses.bodies import ResponsesBody
from minisgl.models.families import ENCODERS, FAMILIES
from minisgl.toy.demo_answers import DEMO_ANSWERS
from minisgl_operator.api.conditions import ConditionType, Reason
from minisgl_operator.shell.config import add_arguments
from support.cli_reference import (
    CONFIGURATION_PAGE,
    MIGRATION_PAGE,
    PAGE,
    commands,
    flags,
    render,
    render_configuration,
    render_migration,
)
from support.memory_table import PAGE as MODELS_PAGE
from support.memory_table import render as render_memory

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_cli_page_is_what_the_program_says() -> None:
    assert PAGE.read_text() == render(), "run `PYTHONPATH=tests .venv/bin/python -m support.cli_reference`"


def test_configuration_page_lists_what_the_program_takes() -> None:
    assert CONFIGURATION_PAGE.read_text() == render_configuration(), "run `python -m support.cli_reference`"


def test_the_configuration_that_the_page_shows_is_what_the_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, printed = re.findall(r"```yaml\n(.*?)```", CONFIGURATION_PAGE.read_text(), re.DOTALL)
    (tmp_path / "serve.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISGL_PORT", "9001")
    assert main(["serve", "--config", "serve.yaml", "--max-running", "128", "--print-config"]) == 0
    assert set(printed.splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_migration_page_lists_the_flags_that_the_program_knows() -> None:
    assert MIGRATION_PAGE.read_text() == render_migration(), "run `python -m support.cli_reference`"


def test_models_page_lists_every_architecture_and_the_memory_that_a_check_prints() -> None:
    page = MODELS_PAGE.read_text()
    assert page == render_memory(), "run `PYTHONPATH=tests .venv/bin/python -m support.memory_table`"
    assert set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", page)) == FAMILIES.keys()
    encoders = {name for name in ENCODERS if not name.endswith("ForMaskedLM")}
    assert set(re.findall(r"`(\w+(?:Model|ForSequenceClassification))`", page)) >= encoders


def test_flags_of_the_reference_system_are_taken_as_its_migration_page_says() -> None:
    page = (ROOT / "docs" / "migrating-from-mini-sglang.md").read_text()
    rows = re.findall(r"^\| (`--.*?) \| .*? \| (.*?) \| .*\|$", page, re.MULTILINE)
    ours = {name: ours.strip("`") for names, ours in rows for name in re.findall(r"`([^`]+)`", names)}
    for name, meant in ours.items():
        assert (FOREIGN[name].ours if name in FOREIGN else name) == meant or meant in ("none", "minisgl chat"), name
    assert {name for flag in MINI_SGLANG for name in flag.names} <= ours.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_figures_of_the_readme_are_those_of_the_performance_page() -> None:
    table = (ROOT / "README.md").read_text().partition("## How fast")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \|(.*)\|$", table, re.MULTILINE)
    figures = {figure for row in rows for figure in re.findall(r"\d[\d,.]*", row)}
    known = set(re.findall(r"\d[\d,.]*\d|\d", (ROOT / "docs" / "performance.md").read_text()))
    assert len(figures) >= 15
    assert figures <= known


def test_the_readme_shows_an_answer_that_the_demo_model_has_learned() -> None:
    shown = (ROOT / "README.md").read_text().partition("$ make run\n")[2].partition("```")[0]
    [(question, answer)] = re.findall(r"asking: (.*)\n +answer: (.*)", shown)
    assert answer in [known.answer for known in DEMO_ANSWERS if question in known.questions]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_other_pages_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*\.md)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_pages_use_exist(page: Path) -> None:
    actions = [action for _, parser in commands(build_parser()) for action in flags(parser)]
    operators = argparse.ArgumentParser()
    add_arguments(operators, {})
    ours = {flag for action in [*actions, *flags(operators)] for flag in action.option_strings}
    lines = page.read_text().splitlines()
    if page.name == "migrating-from-mini-sglang.md":
        lines = [line.split("|")[3] for line in lines if line.startswith("| `")]
    if page.name == "migrating-from-vllm.md":
        lines = [
            line.split("|")[2] if line.startswith("| `") else line for line in lines if "minisgl serve " not in line
        ]
    used = set(re.findall(r"`(--[a-z][a-z0-9-]+)", "\n".join(line for line in lines if "pip install" not in line)))
    used |= {flag for line in lines if "minisgl serve" in line for flag in re.findall(r"(--[a-z][a-z0-9-]+)", line)}
    assert used <= ours | {"--strict"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_pages_show_are_understood(page: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = line.split(" | ")[0].split()
        program = next((at for at, word in enumerate(words) if word in ("minisgl", ".venv/bin/minisgl")), None)
        if program is not None and all("=" in word for word in words[:program]):
            build_parser().parse_args(shlex.split(line.split(" | ")[0], comments=True)[program + 1 :])


def test_every_flag_of_the_reference_system_is_mapped() -> None:
    page = (ROOT / "docs" / "migrating-from-mini-sglang.md").read_text()
    theirs = """--model-path --dtype --tensor-parallel-size --tp-size --max-running-requests --max-seq-len-override
        --memory-ratio --dummy-weight --disable-pynccl --host --port --cuda-graph-max-bs --graph --num-tokenizer
        --tokenizer-count --max-prefill-length --max-extend-length --num-pages --page-size --attention-backend --attn
        --model-source --cache-type --moe-backend --shell-mode cuda_graph_bs distributed_timeout offline_mode
        MINISGL_DISABLE_OVERLAP_SCHEDULING MINISGL_FLASHINFER_USE_TENSOR_CORES MINISGL_PYNCCL_MAX_BUFFER_SIZE
        MINISGL_SHELL_MAX_TOKENS MINISGL_SHELL_TOP_K MINISGL_SHELL_TOP_P MINISGL_SHELL_TEMPERATURE LOG_LEVEL LOG_PID"""
    mapped = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    assert set(theirs.split()) == mapped


def test_api_pages_name_every_field_and_no_other() -> None:
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "structured-output", "other-apis")}
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(pages.values())))
    fields = {*bodies.ChatBody.__struct_fields__, *bodies.CompletionBody.__struct_fields__}
    fields |= {*ResponsesBody.__struct_fields__, *MessagesBody.__struct_fields__}
    others = (NativeBody, NativeSampling, bodies.TokenizeBody, bodies.DetokenizeBody)
    assert fields.union(*(body.__struct_fields__ for body in others)) <= named
    tables = pages["api"].partition("## Fields of both")[2].partition("## Errors")[0]
    tables += pages["other-apis"].partition("## Tokens")[0]
    listed = set(re.findall(r"^\| `([a-z_]+)`", tables, re.MULTILINE))
    assert {"max_tokens", "messages", "input"} <= listed <= fields


def test_api_page_names_every_code_with_its_status() -> None:
    documented = _documented_codes()
    assert errors._STATUS.items() <= documented.items()
    frontend = "\n".join(path.read_text() for path in (ROOT / "runtime/minisgl/frontend").rglob("*.py"))
    raised = re.findall(r'ApiError\(\s*(\d{3}), "([a-z_]+)"', frontend)
    assert raised
    assert {code: int(status) for status, code in raised}.items() <= documented.items()


def test_api_page_names_every_code_of_tokenizer_and_scheduler_with_its_status() -> None:
    """Codes that end requests; others end processes, which the frontend does not outlive, or have no frontend yet."""
    packages = [ROOT / "runtime/minisgl" / package for package in ("router", "tokenizer", "scheduler")]
    sources = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    ends = "Failed|Failure|RequestError|PromptError|ChatTemplateError|_fail|_end_failed|_lose|lost|_drop_client"
    found = set(re.findall(rf'\b(?:{ends})\((?:[^"()]|\(\))*"([a-z_]+)"', sources))
    assert {"queue_full", "engine_stalled", "client_dropped", "draining", "duplicate_request"} <= found
    assert {code: errors._STATUS.get(code, 500) for code in found}.items() <= _documented_codes().items()


def test_api_page_explains_every_code_once_with_a_remedy() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| \d{3} \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    codes = [code for code, _, _ in rows]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"`[a-z_]+`", code) and meaning and remedy for code, meaning, remedy in rows)


def test_symptoms_are_what_the_program_says() -> None:
    """Codes, reasons and quoted messages of the table of symptoms."""
    page = (ROOT / "docs" / "failures.md").read_text()
    table = re.findall(r"^\| (.*?) \| ", page.partition("## Symptoms")[2].partition("## ")[0], re.MULTILINE)
    sources = "\n".join(path.read_text() for path in (ROOT / "runtime/minisgl").rglob("*.py"))
    quoted = [
        part for row in table for message in re.findall(r'"([^"]+)"', row) for part in re.split(r"…|\d+", message)
    ]
    assert len(quoted) >= 5
    assert [part for part in quoted if part.strip() not in sources] == []
    codes = {code for row in table if row[:3].isdigit() for code in re.findall(r"`([a-z_]+)`", row)}
    assert len(codes) >= 5
    assert codes <= _documented_codes().keys()
    names = {name for row in table for name in re.findall(r"`([A-Z]\w+)`", row)}
    reasons = {*(type.value for type in ConditionType), *(reason.value for reason in Reason)}
    assert {name for name in names if name != "Retry-After"} <= reasons


def _documented_codes() -> dict[str, int]:
    page = (ROOT / "docs" / "api.md").read_text()
    return {code: int(status) for status, code in re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", page, re.MULTILINE)}


def test_lock_files_name_no_index_and_pin_everything() -> None:
    for lock in ROOT.glob("requirements*.lock"):
        text = lock.read_text()
        assert not re.search(r"https?://|--index|--find-links|@ file:", text), lock.name
        for block in re.split(r"\n(?=[a-z])", text.partition("make lock\n")[2]):
            assert re.match(r"[a-z0-9.-]+(\[[a-z,]+\])?==\S+", block), f"{lock.name}: {block[:80]}"
            assert "--hash=sha256:" in block, f"{lock.name}: {block[:80]}"


def test_lock_satisfies_the_project() -> None:
    """Every dependency that pyproject.toml names is in the lock, inside its bounds."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {"requirements.lock": ("frontend", "engine", "dev"), "requirements-cuda.lock": tuple(extras)}
    for name, chosen in wanted.items():
        locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", (ROOT / name).read_text(), re.MULTILINE))
        for text in [*project["dependencies"], *(text for extra in chosen for text in extras[extra])]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                assert requirement.extras <= extras.keys(), text
                continue
            bounds = {specifier.operator for specifier in requirement.specifier}
            assert bounds & {"==", "<", "<="}, f"{text} has no upper bound"
            assert bounds & {"==", ">", ">="}, f"{text} has no lower bound"
            assert requirement.specifier.contains(locked[requirement.name]), text


@pytest.mark.parametrize("image", ["operator", "frontend"])
def test_images_without_cuda_have_the_same_packages_on_arm64(image: str) -> None:
    from packaging.requirements import Requirement

    text = (ROOT / "images" / image / "requirements.lock").read_text()
    lines = re.findall(r"^([a-z0-9-]+(?:\[[a-z,-]+\])?==[^\\\n]+?) *\\?$", text, re.MULTILINE)
    assert len(lines) > 10
    for marker in (requirement.marker for requirement in map(Requirement, lines) if requirement.marker is not None):
        linux = {"sys_platform": "linux", "platform_system": "Linux", "python_full_version": "3.11.9"}
        found = {marker.evaluate({**linux, "platform_machine": machine}) for machine in ("x86_64", "aarch64")}
        assert len(found) == 1, marker


def test_make_help_has_a_line_for_every_target() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    helped = {line.split()[1] for line in done.stdout.splitlines()}
    local = {"help", "install", "run", "test", "lint", "bench", "clean", "lock", "lock-base", "test-gpu"}
    builds = {"images", "images-push", "image-engine", "machine"}
    others = {"bench-operator", "bench-gateway", "test-processors", "test-drafts"}
    clusters = {"demo", "demo-down", "test-kubernetes", "e2e", "e2e-long", "e2e-full"}
    assert local | builds | clusters | others == helped


def test_the_project_speaks_only_of_itself() -> None:
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    foreign = re.compile("/wor" + r"k/|pypi\.o" + r"rg|pythonh" + r"osted\.|files\.pyth", re.IGNORECASE)
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".lock", "") and path.is_file():
            found = foreign.search(path.read_text(errors="replace"))
            assert found is None, f"{name}: {found[0] if found else ''}"
