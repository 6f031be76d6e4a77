"""Configuration: one TOML file plus environment, checked as a whole before anything starts; an error names the key.

Environment overrides: `HOTDESK_<SECTION>_<KEY>` for the sections `fleet`, `redis`, `ray`, `policy`, `limits`, for example
`HOTDESK_REDIS_URL`. Group settings come from the file only.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from scheduler.policy import POLICIES
from scheduler.validation import Limits
from state.errors import ConfigError
from state.events import Settings
from state.fair_queue import Share
from state.requests import is_name
from workers.group_config import LORA_TARGETS, EngineConfig, GroupConfig
from workers.inference.dialects import DIALECTS


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "hotdesk"
    data_dir: str = "hotdesk-data"


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`url` empty: an embedded server in `data_dir` (`hotdesk up` only)."""

    url: str = ""
    lease_ms: int = 10_000


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`address` empty: a local Ray that ends with the daemon. With an address, workers are detached and outlive the daemon."""

    address: str = ""
    namespace: str = "hotdesk"


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "fair"
    turn_requests: int = 8
    move_gain: float = 4.0
    turn_least_ms: float = 50.0
    turn_most_ms: float = 2000.0
    turn_switches: float = 20.0
    plan_ms: float = 20.0
    tenants: dict[str, Share] = {}


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body_bytes: int = 16 * 2**20
    datums: int = 1024
    samples: int = 128
    held_requests: int = 64
    gap_deadline_s: float = 30.0
    tenant_queue: int = 256
    total_queue: int = 8192
    result_retention_s: float = 600.0
    outcomes: int = 200_000
    snapshot_after_requests: int = 1024
    snapshot_after_bytes: int = 256 * 2**20
    snapshot_share: float = 0.05


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prometheus metrics of the daemon. `port` 0: none."""

    host: str = "127.0.0.1"
    port: int = 0


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`keys`: tenant -> sha256 of its API key, in hex. `any_key`: every key is a tenant of its own; on a loopback address only."""

    host: str = "127.0.0.1"
    port: int = 8088
    keys: dict[str, str] = {}
    any_key: bool = True
    lora_alpha: float = 16.0
    session_timeout_s: float = 300.0
    sampler_idle_s: float = 600.0
    answer_kept_s: float = 600.0
    unnamed_kept: int = 64
    hold_s: float = 25.0
    body_bytes: int = 32 * 2**20
    engines: dict[str, EngineConfig] = {}  # by group


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fleet: FleetConfig = FleetConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    policy: PolicyConfig = PolicyConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    gateway: GatewayConfig = GatewayConfig()
    groups: dict[str, GroupConfig] = msgspec.field(default_factory=lambda: {"main": GroupConfig()})

    @property
    def data_dir(self) -> Path:
        return Path(self.fleet.data_dir).expanduser().resolve()

    def settings(self) -> Settings:
        return Settings(
            policy=self.policy.name,
            turn_requests=self.policy.turn_requests,
            turn_least_us=int(1000 * self.policy.turn_least_ms),
            turn_most_us=int(1000 * self.policy.turn_most_ms),
            turn_switches=self.policy.turn_switches,
            shares=self.policy.tenants,
            plan_us=int(1000 * self.policy.plan_ms),
            held_requests=self.limits.held_requests,
            gap_deadline_ms=int(self.limits.gap_deadline_s * 1000),
            tenant_queue=self.limits.tenant_queue,
            total_queue=self.limits.total_queue,
            result_retention_ms=int(self.limits.result_retention_s * 1000),
            outcomes=self.limits.outcomes,
            snapshot_after_requests=self.limits.snapshot_after_requests,
            snapshot_fallback=True,
            snapshot_share=self.limits.snapshot_share,
            snapshot_after_bytes=self.limits.snapshot_after_bytes,
            snapshot_beside=True,
            resident_turns=RESIDENT_TURNS,
            move_gain=self.policy.move_gain,
        )

    def request_limits(self) -> Limits:
        return Limits(self.limits.body_bytes, self.limits.datums, self.limits.samples)


RESIDENT_TURNS = 64  # more than adapters that take turns, as a rule; an idle adapter holds its device slot for as many turns of others
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FROM_ENVIRONMENT = ("fleet", "redis", "ray", "policy", "limits", "log", "metrics", "gateway")


def load(path: Path | None, environment: Mapping[str, str] = os.environ) -> Config:
    """Reads and checks the whole configuration. Raises `ConfigError` with the key's name."""
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"configuration file {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"configuration file {path}: {error}") from error
    sections = {f.name: f.type for f in msgspec.structs.fields(Config)}
    for section in _FROM_ENVIRONMENT:
        for field in msgspec.structs.fields(sections[section]):
            value = environment.get(f"HOTDESK_{section}_{field.name}".upper())
            if value is not None:
                raw.setdefault(section, {})[field.name] = value
    try:
        config = msgspec.convert(raw, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_key(str(error))) from error
    _check(config)
    return config


def _with_key(message: str) -> str:
    """msgspec says "... - at `$.groups[...].tp`"; we say the key first."""
    found = re.search(r"^(.*) - at `\$\.?(.*)`$", message)
    unknown = re.search(r"unknown field `(\w+)`", message)
    key = found.group(2) if found else ""
    if unknown:
        key = f"{key}.{unknown.group(1)}".lstrip(".")
        return f"key {key}: there is no such key"
    return f"key {key}: {found.group(1) if found else message}"


def _of_engine(key: str, engine: EngineConfig) -> list[tuple[str, bool, str]]:
    return [
        (f"{key}.url", re.match(r"https?://\S", engine.url) is not None, "must begin with http:// or https://"),
        (f"{key}.model", bool(engine.model), "must name the base model"),
        (f"{key}.connections", engine.connections >= 1, "must be at least 1"),
        (f"{key}.timeout_s", engine.timeout_s > 0, "must be positive"),
        (f"{key}.patience_s", engine.patience_s > 0, "must be positive"),
    ]


def _check(config: Config) -> None:
    with_own = {name for name, group in config.groups.items() if group.engine is not None}
    checks: list[tuple[str, bool, str]] = [
        ("fleet.name", is_name(config.fleet.name), "is no valid name"),
        ("policy.name", config.policy.name in POLICIES, f"is none of {sorted(POLICIES)}"),
        ("policy.move_gain", config.policy.move_gain >= 0, "must not be negative"),
        ("policy.turn_requests", config.policy.turn_requests >= 1, "must be at least 1"),
        ("policy.turn_least_ms", config.policy.turn_least_ms >= 0, "must not be negative"),
        ("policy.turn_most_ms", config.policy.turn_most_ms >= config.policy.turn_least_ms, "must be at least turn_least_ms"),
        ("policy.plan_ms", config.policy.plan_ms >= 0, "must not be negative"),
        ("policy.turn_switches", config.policy.turn_switches >= 0, "must not be negative"),
        *(
            (f"policy.tenants.{name}.weight", 1e-6 <= share.weight <= 1e6, "must be between 1e-6 and 1e6")
            for name, share in config.policy.tenants.items()
        ),
        ("redis.lease_ms", config.redis.lease_ms >= 500, "must be at least 500"),
        (
            "redis.url",
            not config.redis.url or config.redis.url.split("://")[0] in ("redis", "rediss", "unix"),
            "must begin with redis://, rediss:// or unix://",
        ),
        ("groups", bool(config.groups), "needs at least one group"),
        ("metrics.port", 0 <= config.metrics.port < 65536, "is no port"),
        ("gateway.port", 0 <= config.gateway.port < 65536, "is no port"),
        (
            "gateway.any_key",
            not config.gateway.any_key or config.gateway.host in LOOPBACK,
            f"must be false where gateway.host {config.gateway.host!r} can be reached from elsewhere; name the keys in gateway.keys",
        ),
        *(
            (f"gateway.keys.{name}", is_name(name) and re.fullmatch("[0-9a-f]{64}", key) is not None, "is no tenant name and sha256 in hex")
            for name, key in config.gateway.keys.items()
        ),
        *(
            (f"gateway.{name}", getattr(config.gateway, name) > 0, "must be positive")
            for name in ("lora_alpha", "session_timeout_s", "sampler_idle_s", "answer_kept_s", "unnamed_kept", "hold_s", "body_bytes")
        ),
        *(
            check
            for name, engine in config.gateway.engines.items()
            for check in (
                (f"gateway.engines.{name}.url", name in config.groups, "there is no such group"),
                (f"gateway.engines.{name}", name not in with_own, f"group {name!r} has an engine of its own, in groups.{name}.engine"),
                *_of_engine(f"gateway.engines.{name}", engine),
            )
        ),
        ("gateway.hold_s", config.gateway.hold_s <= 40, "must be at most 40: clients give up after 45 s"),
        *((f"limits.{name}", value > 0, "must be positive") for name, value in msgspec.structs.asdict(config.limits).items()),
    ]
    for name, group in config.groups.items():
        model = group.model
        if group.engine is not None:
            checks += [
                *_of_engine(f"groups.{name}.engine", group.engine),
                (f"groups.{name}.engine", group.backend == "megatron", "needs the megatron backend"),
                (f"groups.{name}.engine.dialect", bool(DIALECTS[group.engine.dialect].asleep), "cannot say whether it sleeps; vllm can"),
            ]
        checks += [
            (f"groups.{name}", is_name(name), "is no valid name"),
            *(
                (f"groups.{name}.{key}", getattr(group, key) >= 1, "must be at least 1")
                for key in ("tp", "dp", "max_rank", "device_slots", "host_slots", "threads_per_rank")
            ),
            *(
                (f"groups.{name}.model.{key}", getattr(model, key) >= 1, "must be at least 1")
                for key in ("layers", "hidden_size", "heads", "ffn_hidden_size", "vocab_size", "max_sequence_tokens")
            ),
            (f"groups.{name}.sample_rows", group.sample_rows >= 0, "must not be negative"),
            (f"groups.{name}.sample_tokens", group.sample_tokens >= 1, "must be at least 1"),
            (f"groups.{name}.model.hidden_size", model.hidden_size % max(1, model.heads) == 0, "must be a multiple of model.heads"),
            (f"groups.{name}.model.heads", model.heads % max(1, group.tp) == 0, "must be a multiple of tp"),
            (f"groups.{name}.model.vocab_size", model.vocab_size % max(1, group.tp) == 0, "must be a multiple of tp"),
            (f"groups.{name}.max_rank", group.max_rank % max(1, group.tp) == 0, "must be a multiple of tp"),
            (
                f"groups.{name}.targets",
                bool(group.targets) and not set(group.targets) - LORA_TARGETS,
                f"must be among {sorted(LORA_TARGETS)}",
            ),
        ]
    for key, good, why in checks:
        if not good:
            raise ConfigError(f"key {key}: {why}")
