"""Settings of a server, from flags, the environment (``FORERUN_*``) and a TOML file; the first of them counts."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ByteSize, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from forerun.kv.kv_tiers import KVMemory
from forerun.server.admission import SchedulerLimits
from forerun.server.tenants import ApiKeys

ENVIRONMENT_PREFIX = "FORERUN_"
FREE_MEMORY_FRACTION = 0.5
"""Default fraction of the free memory for keys and values."""
PREFIX_FRACTION = 0.125
"""Default fraction of the free memory for kept prefixes. Three eighths are left for indexes and others."""
LISTS = ("api_keys", "allowed_hosts", "cors_origins")
"""Settings that flags fill entry by entry."""
MIB = 1 << 20
BYTE_SIZE = "allowed is a number of bytes, or one with a unit, such as 4GiB"
ALLOWED = {"byte_size": BYTE_SIZE, "byte_size_unit": BYTE_SIZE}
"""Messages that replace pydantic's, by error type."""


class ServerSettings(BaseSettings):
    """All settings of ``forerun serve``; docs/serving.md explains them."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    model: str = "bundled"
    name: str | None = None
    dtype: str = "auto"
    activations: str = "auto"
    quantize: str | None = None
    device: str = "auto"
    drafter: str = "auto"
    draft_model: str | None = None
    budget: Annotated[int, Field(ge=1)] | None = None
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    admin_key: SecretStr | None = None
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    rows: Annotated[int, Field(ge=1)] = 16
    waiting: Annotated[int, Field(ge=0)] = 128
    step: Annotated[int, Field(ge=1)] = 256
    kv_memory: Annotated[ByteSize, Field(ge=1)] | None = None
    kv_dtype: str = "auto"
    kv_host_memory: Annotated[ByteSize, Field(ge=0)] | None = None
    kv_folder: Path | None = None
    kv_folder_limit: Annotated[ByteSize, Field(ge=0)] | None = None
    prefix_cache: Annotated[ByteSize, Field(ge=0)] | None = None
    kv_store: Path | None = None
    kv_store_limit: Annotated[ByteSize, Field(ge=0)] | None = None
    kv_store_expiry: Annotated[float, Field(gt=0)] | None = None
    kv_store_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    connections: Annotated[int, Field(ge=1)] = 512
    request_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(8 * MIB)
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    namespaces: Annotated[int, Field(ge=1)] = 64
    share: bool = False
    warm: Annotated[tuple[Path, ...], NoDecode] = ()
    warm_seconds: Annotated[float, Field(gt=0)] = 60.0
    index: Path | None = None
    index_interval: Annotated[float, Field(gt=0)] = 60.0
    index_limit: Annotated[ByteSize, Field(ge=MIB)] = ByteSize(1024 * MIB)
    timeout: Annotated[float, Field(gt=0)] | None = 600.0
    drain: Annotated[float, Field(ge=0)] = 5.0
    page: bool = True
    log_json: bool = False
    ray: bool = False
    replicas: Annotated[int, Field(ge=1)] = 1

    @field_validator(*LISTS, "warm", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        return [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else given

    @field_validator("kv_host_memory", "kv_folder", "kv_folder_limit")
    @classmethod
    def _check_base(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse limits of a tier below an unlimited one."""
        base = "kv_folder" if info.field_name == "kv_folder_limit" else "kv_memory"
        if given is not None and base in info.data and info.data[base] is None:
            what = "the files there" if base == "kv_folder" else "what does not fit on the device"
            raise ValueError(f"it is for {what}; set {base}, too")
        return given

    @property
    def served_name(self) -> str:
        return self.name or Path(self.model).name

    @property
    def checked_hosts(self) -> tuple[str, ...] | None:
        """The allowed names in a Host header, or None for any with keys, which no web page has."""
        return None if self.api_keys and not self.allowed_hosts else (self.host, *self.allowed_hosts)

    def tenant_keys(self) -> ApiKeys:
        admin = None if self.admin_key is None else self.admin_key.get_secret_value()
        return ApiKeys([key.get_secret_value() for key in self.api_keys], admin)

    def tiers(self, device: torch.device) -> KVMemory | None:
        """Return the limits of all tiers of keys and values, or None for the device alone; raise as ``free_disk``."""
        if self.kv_memory is None or (self.kv_host_memory is None and self.kv_folder is None):
            return None
        cpu = torch.device("cpu")
        here, host, file = int(self.kv_memory), self.kv_host_memory, 0
        if host is None:
            free = free_memory(cpu) - (here if device.type == "cpu" else 0)
            host = ByteSize(max(0, self._part(FREE_MEMORY_FRACTION, free, cpu)))
        if self.kv_folder is not None:
            limit, free = self.kv_folder_limit, free_disk(self.kv_folder)
            file = self._part(FREE_MEMORY_FRACTION, free, cpu) if limit is None else int(limit)
        return KVMemory(here, int(host), self.kv_folder, file=file)

    def limits(self, device: torch.device) -> SchedulerLimits:
        """Return the scheduler's limits on this device."""
        memory = self.kv_memory or self._part(FREE_MEMORY_FRACTION, free_memory(device), device)
        return SchedulerLimits(int(memory), self.rows, self.waiting, self.step, max(1, len(self.api_keys)))

    def prefix_limit(self, device: torch.device) -> int:
        if self.prefix_cache is not None:
            return int(self.prefix_cache)
        return self._part(PREFIX_FRACTION, free_memory(device), device)

    def _part(self, fraction: float, free: int, device: torch.device) -> int:
        """Return a fraction of free memory for this process: replicas may share a machine, but not a GPU."""
        return int((fraction / self.replicas if device.type == "cpu" else fraction) * free)


def read_settings(flags: Mapping[str, Any], file: Path | None = None) -> ServerSettings:
    """Read settings from flags, the environment and a TOML file, in this order; raise ValueError for a wrong file,
    setting or variable, without values in the message, which may be keys."""
    in_file = {} if file is None else tomllib.loads(file.read_text("utf-8"))
    in_environment = {name.upper() for name in os.environ}
    for name in LISTS:
        if (flag := (ENVIRONMENT_PREFIX + name.removesuffix("s")).upper()) in in_environment:
            raise ValueError(f"settings: {flag} is ignored; use {flag}S, with commas between several")
    unset = {name: each for name, each in in_file.items() if (ENVIRONMENT_PREFIX + name).upper() not in in_environment}
    try:
        return ServerSettings(**{**unset, **flags})
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, each['loc']))}: {ALLOWED.get(each['type'], each['msg'])}"
            for each in error.errors(include_input=False)
        ]
        raise ValueError(f"settings: {'; '.join(wrong)}") from None


def free_disk(folder: Path) -> int:
    """Return the free bytes on a folder's disk; create the folder if needed; raise OSError if not writable."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return shutil.disk_usage(folder).free


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a device; in host memory, without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
