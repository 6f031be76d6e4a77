"""What a scrape tells is what the fold says, also where there are more tenants than series."""

from __future__ import annotations

from ops import metrics
from state.fleet import Fleet, Tenant
from tests.ops.test_why_and_what_if import fleet_under


def told(fleet: Fleet) -> dict[tuple[str, ...], float]:
    found = {}
    for family in metrics.families(fleet, leading=True):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_the_folds_counters_are_told():
    fleet = fleet_under("fair").core.fleet
    seen = told(fleet)
    assert seen["hotdesk_events_total",] == fleet.events
    assert seen["hotdesk_group_turns_total", "main"] == fleet.groups["main"].turns > 0
    assert seen["hotdesk_group_up", "main"] == 1
    for name, tenant in fleet.tenants.items():
        assert seen["hotdesk_requests_total", name, "completed"] == tenant.completed > 0
        assert seen["hotdesk_accelerator_seconds_total", name] == tenant.used_us / 1e6
    adapters = [value for key, value in seen.items() if key[0] == "hotdesk_adapters"]
    assert sum(adapters) == len(fleet.adapters) == 3


def test_tenants_without_a_series_of_their_own_are_summed(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_TENANTS", 2)
    fleet = Fleet(tenants={f"t{n}": Tenant(accepted=1, completed=n, used_us=n) for n in range(5)})
    seen = told(fleet)
    assert {key[1] for key in seen if key[0] == "hotdesk_requests_queued"} == {"t4", "t3", metrics.OTHERS}
    assert seen["hotdesk_requests_total", metrics.OTHERS, "completed"] == 0 + 1 + 2
