"""What a gateway holds for a tenant, and for how long."""

from __future__ import annotations

import anyio
import pytest

from scheduler.config import GatewayConfig
from scheduler.gateway.app import Gateway

pytestmark = pytest.mark.anyio


async def test_a_tenant_that_sends_nothing_any_more_costs_nothing(server):
    gateway = Gateway(GatewayConfig(answer_kept_s=0.5, session_timeout_s=0.4), server.url, "desks", {})
    async with gateway._life(gateway._rest):
        await gateway.desk("ada")
        with anyio.fail_after(10):
            while "ada" in gateway._desks:
                await anyio.sleep(0.05)
