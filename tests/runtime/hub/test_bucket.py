"""Models in buckets, with a store that works, and with one that fails."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from minisgl import LLM, SamplingParams
from minisgl.cli.main import main
from minisgl.errors import HubError
from minisgl.hub import bucket as buckets
from minisgl.hub import fetch as model_fetch
from minisgl.hub.bucket import Bucket
from minisgl.hub.fetch import fetch
from minisgl.hub.fetch_error import FetchError
from minisgl.hub.headers import fetch_headers
from minisgl.hub.neighbours import Neighbours
from minisgl.hub.resolve import resolve
from minisgl.wire.status import FetchStatus
from support.object_store import KEY, ObjectStore
from support.tiny_checkpoint import tiny_checkpoint

URI = "s3://models/team/tiny"
PREFIX = "team/tiny/"
LARGE_BYTES = 3 << 20
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Variables of a machine with credentials and with a cache of its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_fetch, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(buckets, "_RATE_LIMIT_SECONDS", 0.01)
    return monkeypatch


@pytest.fixture
def objects() -> dict[str, bytes]:
    source = random.Random(1)
    return {
        f"{PREFIX}config.json": b'{"model_type": "tiny"}',
        f"{PREFIX}tokenizer.json": b"{}",
        f"{PREFIX}README.md": b"not needed by a server",
        f"{PREFIX}original/params.json": b"{}",
        f"{PREFIX}1_Pooling/config.json": b"{}",
        **{f"{PREFIX}{name}": source.randbytes(LARGE_BYTES) for name in (*WEIGHTS, "consolidated.safetensors")},
        "team/tiny-2/config.json": b"of another model",
    }


@pytest.fixture
def store(objects: dict[str, bytes], environment: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store = ObjectStore({"models": objects})
    with store.serve() as url:
        environment.setenv("AWS_ENDPOINT_URL_S3", url)
        yield store


def run_fetch(directory: Path, uri: str = URI) -> list[FetchStatus]:
    published: list[FetchStatus] = []
    published.append(fetch(Bucket(uri), directory, published.append))
    return published


def files_of(directory: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    del found["minisgl-fetch.json"]
    return found


def expected(objects: dict[str, bytes]) -> dict[str, bytes]:
    names = ("config.json", "tokenizer.json", "1_Pooling/config.json", *WEIGHTS)
    return {name: objects[f"{PREFIX}{name}"] for name in names}


def test_the_files_that_a_server_reads_are_fetched_and_the_progress_is_published(
    store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    published = run_fetch(tmp_path / "model")
    assert files_of(tmp_path / "model") == expected(objects)
    record = json.loads((tmp_path / "model" / "minisgl-fetch.json").read_text())
    assert (record["repository"], record["revision"]) == (URI, "")
    assert (published[0].phase, published[-1].phase) == ("Resolving", "Done")
    assert published[-1].commit == record["commit"]
    assert any(0 < status.percent < 100 for status in published)
    assert not list(tmp_path.glob("*.partial-*"))


def test_the_usual_variables_give_region_and_session(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("AWS_DEFAULT_REGION", "eu-test-7")
    environment.setenv("AWS_SESSION_TOKEN", "of-the-session")
    run_fetch(tmp_path / "model")
    assert (store.regions, store.tokens) == ({"eu-test-7"}, {"of-the-session"})


def test_a_profile_gives_credentials_and_endpoint(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = os.environ["AWS_ENDPOINT_URL_S3"]
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    (tmp_path / "credentials").write_text(f"[lab]\naws_access_key_id={KEY}\naws_secret_access_key=secret\n")
    (tmp_path / "config").write_text(f"[profile lab]\nendpoint_url={url}\n")
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    environment.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    environment.setenv("AWS_PROFILE", "lab")
    assert run_fetch(tmp_path / "model")[-1].phase == "Done"


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_an_interrupted_download_is_resumed(
    knows_ranges: bool, store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    store.broken_downloads, store.knows_ranges = 3, knows_ranges
    run_fetch(tmp_path / "model")
    assert files_of(tmp_path / "model") == expected(objects)
    if knows_ranges:
        assert all(number == len(objects[key]) for key, number in store.sent.items())


def test_a_second_fetch_resumes_the_files_of_a_failed_one(
    store: ObjectStore, objects: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
        store.broken_downloads = 1
        with pytest.raises(FetchError) as failed:
            run_fetch(tmp_path / "model")
    assert (failed.value.code, failed.value.exit_code) == ("Unreachable", 1)
    assert not (tmp_path / "model").exists(), "a half download has the name of the checkpoint"
    run_fetch(tmp_path / "model")
    assert files_of(tmp_path / "model") == expected(objects)


@pytest.mark.parametrize("knows_conditions", [True, False])
def test_files_are_never_of_two_uploads(
    knows_conditions: bool, store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    new = {name: content[::-1] for name, content in objects.items() if name.endswith(WEIGHTS)}
    store.knows_conditions = knows_conditions

    def replace(key: str) -> None:
        store.on_download = lambda key: None
        objects.update(new)

    store.on_download = replace
    published = run_fetch(tmp_path / "model")
    assert files_of(tmp_path / "model") == expected(objects)
    assert [status.phase for status in published].count("Resolving") > 1, "the files were not listed again"


def test_a_folder_whose_upload_is_in_progress_is_not_fetched(
    store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    late = objects.pop(f"{PREFIX}{WEIGHTS[1]}")
    with pytest.raises(FetchError, match=f"lacks 1 of its weight files, such as {WEIGHTS[1]}: wait") as failed:
        run_fetch(tmp_path / "model")
    assert (failed.value.code, store.requests["get"]) == ("NotFound", 0)
    objects[f"{PREFIX}{WEIGHTS[1]}"] = late
    assert run_fetch(tmp_path / "model")[-1].phase == "Done"


def test_an_upload_without_end_is_an_error(store: ObjectStore, objects: dict[str, bytes], tmp_path: Path) -> None:
    def change(key: str) -> None:
        objects[f"{PREFIX}{WEIGHTS[0]}"] += b"x"

    store.on_download = change
    with pytest.raises(FetchError, match="changed during each of 3 downloads: wait until their upload has ended"):
        run_fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_thousand_and_one_objects_are_listed_in_pages(
    store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    for number in range(1001 - len(objects)):
        objects[f"{PREFIX}a/{number}.json"] = b"{}"
    objects[f"{PREFIX}zz.json"] = b"{}"
    _, files = Bucket(URI).listing()
    assert store.requests["list"] == 2
    assert {file.name for file in files} == {*expected(objects), "zz.json"}


def test_a_folder_of_too_many_objects_is_no_checkpoint(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(buckets, "_MOST_OBJECTS", 3)
    store.page_size = 2
    with pytest.raises(FetchError, match="has more than 3 objects: name the folder of one checkpoint") as failed:
        run_fetch(tmp_path / "model", "s3://models")
    assert (failed.value.code, store.requests["list"]) == ("NotFound", 2)


def test_pages_without_objects_have_an_end(store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(buckets, "_MOST_OBJECTS", 3)
    store.empty_pages = True
    with pytest.raises(FetchError, match="has more than 3 objects"):
        run_fetch(tmp_path / "model")


def test_a_file_of_another_store_is_not_linked_for_the_name_of_its_bucket(
    objects: dict[str, bytes], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    neighbours = Neighbours(share_files=True)
    for place in ("one", "other"):
        with ObjectStore({"models": objects}).serve() as url:
            fetch(Bucket(URI, url), tmp_path / place, lambda _: None, neighbours)
        for name in WEIGHTS:
            assert (tmp_path / place / name).read_bytes() == objects[f"{PREFIX}{name}"]
            # A store may give an ETag to any content.
            (tmp_path / place / name).write_bytes(bytes(LARGE_BYTES))


def test_no_file_is_written_outside_of_the_checkpoint(
    store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("../outside.json", "additional_chat_templates/../../out.jinja", "/etc/x.json", "a/../../b.json"):
        objects[f"{PREFIX}{name}"] = b"hostile"
    objects[PREFIX] = b""
    run_fetch(tmp_path / "deep" / "model")
    assert files_of(tmp_path / "deep" / "model") == expected(objects)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not written & {"outside.json", "out.jinja", "x.json"}


def test_a_whole_bucket_can_be_the_model(store: ObjectStore, tmp_path: Path) -> None:
    store.buckets["tiny-model"] = {"config.json": b"{}", "model.safetensors": b"x", "folder/": b""}
    for uri in ("s3://tiny-model", "s3://tiny-model/"):
        assert {file.name for file in Bucket(uri).listing()[1]} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("uri", "words", "code"),
    [
        ("s3://none/team/tiny", "has no bucket none: check its name", "NotFound"),
        ("s3://models/team/none", "has no objects: check the prefix", "NotFound"),
        ("s3://models/team/tiny-2", r"it needs config\.json and \*\.safetensors$", "NotFound"),
        ("s3://models/pickled", r"has only pickled weights \(pytorch_model\.bin\), which are never loaded", "NotFound"),
        ("s3://models/weights", r"and has no config\.json", "NotFound"),
        ("s3://models/gguf", "and has GGUF, which is not supported", "NotFound"),
        ("s3://", "write s3://BUCKET/PREFIX", "NotFound"),
        ("s3://under score/x", "write s3://BUCKET/PREFIX", "NotFound"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(
    uri: str, words: str, code: str, store: ObjectStore, objects: dict[str, bytes], tmp_path: Path
) -> None:
    objects |= {
        "pickled/config.json": b"{}",
        "pickled/pytorch_model.bin": b"x",
        "weights/model.safetensors": b"x",
        "gguf/config.json": b"{}",
        "gguf/model-q4.gguf": b"x",
    }
    with pytest.raises(FetchError, match=words) as failed:
        run_fetch(tmp_path / "model", uri)
    assert (failed.value.code, failed.value.exit_code) == (code, 2)


def test_denied_access_says_what_the_credentials_need(store: ObjectStore, tmp_path: Path) -> None:
    store.denies = True
    with pytest.raises(FetchError, match="need s3:ListBucket on bucket models and s3:GetObject") as failed:
        run_fetch(tmp_path / "model")
    assert (failed.value.code, failed.value.exit_code) == ("AuthRequired", 2)


def test_a_wrong_key_is_refused(store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")
    words = r"does not accept the credentials .*InvalidAccessKeyId.*: renew them"
    with pytest.raises(FetchError, match=words) as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == "AuthRequired"


def test_missing_credentials_are_named(store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FetchError, match="cannot be used") as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == "AuthRequired"
    environment.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(FetchError, match="there are no credentials for s3://models/team/tiny: set AWS_ACCESS_KEY_ID"):
        run_fetch(tmp_path / "model")
    environment.setenv("AWS_PROFILE", "none")
    with pytest.raises(FetchError, match="profile") as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == "AuthRequired"
    assert not store.requests


@pytest.mark.parametrize(
    ("refusal", "words", "code"),
    [
        ((400, "AuthorizationHeaderMalformed"), "check the endpoint and AWS_DEFAULT_REGION", "NotFound"),
        ((403, "RequestTimeTooSkewed"), "set the clock", "AuthRequired"),
        ((404, "Nothing"), "check the bucket and the endpoint", "NotFound"),
        ((409, "Conflict"), "did not return s3://models/team/tiny: Conflict: refused", "Unreachable"),
    ],
)
def test_other_refusals_say_what_to_check(
    refusal: tuple[int, str], words: str, code: str, store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    store.refused = [refusal] * 2
    with pytest.raises(FetchError, match=words) as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == code


def test_a_store_that_limits_requests_is_asked_again(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    store.refused = [(503, "SlowDown")] * 3
    published: list[FetchStatus] = []
    assert fetch(Bucket(URI), tmp_path / "model", published.append).phase == "Done"
    assert "RateLimited" in {status.reason for status in published}


def test_an_endpoint_that_is_not_reached_is_retryable(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    environment.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    with pytest.raises(FetchError, match=r"cannot be reached .*check AWS_ENDPOINT_URL_S3 and the network") as failed:
        fetch(Bucket(URI, "http://127.0.0.1:1"), tmp_path / "model", lambda _: None)
    assert (failed.value.code, failed.value.exit_code) == ("Unreachable", 1)
    with pytest.raises(FetchError, match="write the endpoint as a URL") as failed:
        fetch(Bucket(URI, "minio:9000"), tmp_path / "model", lambda _: None)
    assert failed.value.code == "NotFound"


def test_a_bundle_of_certificates_that_is_missing_is_named(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(FetchError, match=r"AWS_CA_BUNDLE is /nowhere\.pem, which is not a file"):
        run_fetch(tmp_path / "model")


@pytest.mark.parametrize("page", [b"<html><br>a private page</html>", b"{}", b"\xff"])
def test_an_answer_that_is_not_of_an_object_store_is_an_error_without_it(
    page: bytes, store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    store.page = page
    environment.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    words = r"500: .*; it does not answer as an object store does: check the endpoint$"
    with pytest.raises(FetchError, match=words) as failed:
        run_fetch(tmp_path / "model")
    assert "private" not in str(failed.value)
    assert (failed.value.code, failed.value.exit_code) == ("Unreachable", 1)


def test_a_long_text_of_a_store_leaves_room_for_the_reason(store: ObjectStore, tmp_path: Path) -> None:
    store.refused = [(400, "Long" * 5000)] * 2
    log = tmp_path / "termination-log"
    assert main(["models", "fetch", URI, str(tmp_path / "model"), "--termination-log", str(log)]) == 2
    assert json.loads(log.read_text())["reason"] == "NotFound"
    assert log.stat().st_size < 4096


def test_a_connection_that_breaks_off_below_http_is_retryable() -> None:
    failure = Bucket(URI).failure(urllib3.exceptions.SSLError("decryption failed or bad record mac"))
    assert failure is not None and failure.is_retryable


def test_an_endpoint_that_is_no_object_store_is_an_error(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    environment.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(FetchError, match="cannot be reached"):
        fetch(Bucket(URI, f"http://127.0.0.1:{port}"), tmp_path / "model", lambda _: None)


def test_too_little_space_is_detected_before_the_download(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    environment.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(FetchError, match=r"6\.0 MiB more, and .* has 1\.0 MiB free: make the volume larger") as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == "NoSpace"
    assert not store.requests["get"]


def test_a_disk_that_fills_up_is_an_error(
    store: ObjectStore, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    environment.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match="no space is left") as failed:
        run_fetch(tmp_path / "model")
    assert failed.value.code == "NoSpace"


def test_the_command_of_the_fetch_job_reports_as_for_the_hub(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, log = os.environ.pop("AWS_ENDPOINT_URL_S3"), tmp_path / "termination-log"
    command = ["--endpoint", f"{url}/", "--share-files", "--owner", "tiny", "--termination-log", str(log)]
    assert main(["models", "fetch", URI, str(tmp_path / "model"), *command]) == 0
    assert json.loads(log.read_text())["phase"] == "Done"
    assert main(["models", "fetch", "s3://models/none", str(tmp_path / "other"), *command]) == 2
    assert json.loads(log.read_text())["reason"] == "NotFound"
    assert main(["models", "fetch", URI, str(tmp_path / "other"), "--revision", "v1", *command]) == 2
    assert "has no revisions: remove --revision" in capsys.readouterr().err


def test_a_model_is_resolved_to_a_copy_that_serves_without_the_store(
    objects: dict[str, bytes], environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    environment.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    store = ObjectStore({"models": objects})
    with store.serve() as url:
        environment.setenv("AWS_ENDPOINT_URL_S3", url)
        first = resolve(URI)
        assert files_of(first) == expected(objects)
        downloads = store.requests["get"]
        assert resolve(f"{URI}/") == first
        assert store.requests["get"] == downloads, "a second start downloads nothing"
    assert resolve(URI) == first
    assert f"using the copy of {URI}" in caplog.text
    with pytest.raises(FetchError, match="cannot be reached"):
        resolve("s3://models/team/other")


def test_a_changed_model_is_downloaded_without_the_files_that_stayed(
    store: ObjectStore, objects: dict[str, bytes]
) -> None:
    first = resolve(URI)
    old, changed, kept = expected(objects), f"{PREFIX}{WEIGHTS[0]}", f"{PREFIX}{WEIGHTS[1]}"
    objects[changed] = objects[changed][::-1]
    second = resolve(URI)
    assert files_of(second) == expected(objects)
    assert files_of(first) == old, "a server may still read them"
    assert store.sent[kept] == LARGE_BYTES
    objects[changed] = old[WEIGHTS[0]]
    assert resolve(URI) == first


def test_a_copy_is_not_used_once_access_is_denied(store: ObjectStore) -> None:
    resolve(URI)
    store.denies = True
    with pytest.raises(HubError, match="denies access"):
        resolve(URI)


def test_without_weights_only_small_files_are_downloaded(store: ObjectStore, objects: dict[str, bytes]) -> None:
    small = resolve(URI, with_weights=False)
    assert files_of(small).keys() == expected(objects).keys() - {*WEIGHTS}
    assert resolve(URI) != small


def test_an_empty_weight_file_is_left_to_the_check(store: ObjectStore, tmp_path: Path) -> None:
    store.buckets["empty"] = {"config.json": b"{}", "model.safetensors": b""}
    fetch_headers(Bucket("s3://empty"), tmp_path / "found")
    assert (tmp_path / "found" / "model.safetensors").stat().st_size == 0


def test_a_model_in_a_bucket_is_checked_fetched_and_served(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint()
    store.put("models", "real/tiny/", checkpoint)
    assert main(["models", "check", str(checkpoint)]) == 0
    local = capsys.readouterr().out
    assert main(["models", "check", "s3://models/real/tiny"]) == 0
    assert capsys.readouterr().out == local
    assert main(["models", "fetch", "s3://models/real/tiny", str(tmp_path / "model")]) == 0
    answers = []
    for model in (checkpoint, tmp_path / "model", "s3://models/real/tiny"):
        with LLM(model, device="cpu", num_pages=64, page_size=4, max_running=2, max_model_len=64) as llm:
            [output] = llm.generate("Hello there", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        answers.append(output.token_ids)
    assert answers[0] and answers == [answers[0]] * 3
