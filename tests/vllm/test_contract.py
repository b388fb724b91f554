"""The tuning protocol's contract on a hooked scheduler of the installed vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.tuning_protocol import TuningProtocolContract
from tests.vllm.endpoint import Driver, DriverEndpoint

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def driver(vllm_python: Path) -> Iterator[Driver]:
    running = Driver(vllm_python)
    yield running
    running.close()


class TestContract(TuningProtocolContract):
    @pytest.fixture
    def endpoint(self, driver: Driver) -> DriverEndpoint:
        return DriverEndpoint(driver)
