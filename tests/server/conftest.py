"""Servers for all tests of this folder, and clients of them."""

from collections.abc import Iterator

import httpx2 as httpx
import openai
import pytest

from server.running import etude, running, wait_until_ready
from soloist.server.serve import Server


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with running(lambda _: etude()) as made:
        yield wait_until_ready(made)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made
