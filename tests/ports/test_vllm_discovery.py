"""What is at an address: the protocol, a vLLM without the hook (and what remains possible), or neither."""

from pathlib import Path

import pytest

from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.vllm.port import Access, Unseen, Use, discover
from rooftune.tuner.ports.vllm.versions import Hook, Version
from tests.ports.samples import state
from tests.ports.scripted import Script, answer, message, routes

PAGE = """
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:num_preemptions_total{engine="0"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3
vllm:inter_token_latency_seconds_sum{engine="0"} 3
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2588",note="a\\"b}"} 1.0
"""


def vllm(page: str = PAGE, version: bytes = b'{"version":"0.32.0+cpu"}') -> dict[str, Script]:
    return {"/metrics": answer(200, page.encode()), "/version": answer(200, version)}


def test_vllm_without_the_hook_can_be_watched_and_advised() -> None:
    with routes(vllm()) as server:
        found = discover(server.url)
        assert [head.split(" ")[1] for head, _ in server.received] == ["/tuning/v1/state", "/metrics", "/version"]
    assert found.access is Access.OBSERVE_ONLY and found.state is None
    assert found.version == Version(0, 32) and found.able is not None and found.able.hook is Hook.MOVES
    assert found.uses == frozenset(Use) and found.missing == {} and found.engines == 1
    assert found.unseen == frozenset(Unseen), "no page tells these, whatever the version"


def test_a_recorded_page_of_a_real_server(shared_data: Path) -> None:
    with routes(vllm((shared_data / "metrics" / "vllm-0.32.0-cpu.prom").read_text())) as server:
        found = discover(server.url)
    assert found.uses == frozenset(Use) and found.engines == 1


def test_old_metric_names_are_recognised() -> None:
    old = PAGE.replace("kv_cache_usage_perc", "gpu_cache_usage_perc").replace(
        "inter_token_latency", "time_per_output_token"
    )
    with routes(vllm(old)) as server:
        assert discover(server.url).uses == frozenset(Use)


def test_a_missing_series_is_named_and_its_use_disabled() -> None:
    page = PAGE.replace("vllm:time_to_first_token_seconds", "vllm:other")
    with routes(vllm(page)) as server:
        found = discover(server.url)
    assert found.uses == frozenset(Use) - {Use.WATCH_LATENCY}
    assert found.missing == {Use.WATCH_LATENCY: ("vllm:time_to_first_token_seconds",)}


def test_engines_behind_one_address_are_counted() -> None:
    config = 'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="10"} 1.0\n'
    with routes(vllm(PAGE + config)) as server:
        assert discover(server.url).engines == 2


@pytest.mark.parametrize("version", [b'{"version":"dev"}', b"{}", b"nothing", b'{"version":3}'])
def test_an_unreported_version_is_unknown(version: bytes) -> None:
    with routes(vllm(version=version)) as server:
        found = discover(server.url)
    assert found.version is None and found.able is not None and found.able.hook is Hook.READ_ONLY


@pytest.mark.parametrize("page", [None, "go_goroutines 3\n", "# vllm:num_requests_running\n", ""])
def test_another_server_is_neither(page: str | None) -> None:
    with routes({} if page is None else {"/metrics": answer(200, page.encode())}) as server:
        assert discover(server.url).access is Access.UNKNOWN_SERVER


def test_an_engine_with_the_protocol_identifies_itself() -> None:
    hooked = message(state(engine="vllm", engine_version="0.31.2"))
    with routes({"/tuning/v1/state": hooked}) as server:
        found = discover(server.url)
    assert found.access is Access.PROTOCOL and found.state is not None
    assert found.version == Version(0, 31, 2) and found.able is not None and not found.able.tried
    with routes({"/tuning/v1/state": message(state())}) as server:
        found = discover(server.url)
    assert found.access is Access.PROTOCOL and found.version is None and found.able is None, "not vLLM's"


def test_the_tuning_token_is_sent_only_to_the_protocol(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("tuning-token-0123456789")
    with routes(vllm()) as server:
        discover(server.url, file)
        sent = [server.header("authorization", at) is not None for at in range(len(server.received))]
    assert sent == [True, False, False]


def test_a_refusing_protocol_is_not_taken_for_a_vllm_without_one() -> None:
    with routes(vllm() | {"/tuning/v1/state": answer(401, b"{}")}) as server:
        with pytest.raises(PortError) as caught:
            discover(server.url)
        assert caught.value.fault is PortFault.UNAUTHORIZED and len(server.received) == 1
