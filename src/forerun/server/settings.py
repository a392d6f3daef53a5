"""What a server is told by flags, by the environment (``FORERUN_*``) and by a TOML file; the first of them counts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ByteSize, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from forerun.kv.placement import KVMemory
from forerun.server.limits import Limits

PREFIX = "FORERUN_"
SHARE = 0.5
"""Part of the memory that is free at the start that keys and values may take by default. The rest is for indexes, for
texts that are kept, and for other programs."""
MIB = 1 << 20


class ServerSettings(BaseSettings):
    """All settings of ``forerun serve``; docs/serving.md explains them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    model: str = "bundled"
    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    drafter: str = "auto"
    draft_model: str | None = None
    budget: Annotated[int, Field(ge=1)] | None = None
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    rows: Annotated[int, Field(ge=1)] = 16
    waiting: Annotated[int, Field(ge=0)] = 128
    step: Annotated[int, Field(ge=1)] = 256
    kv_memory: Annotated[ByteSize, Field(ge=1)] | None = None
    kv_host_memory: Annotated[ByteSize, Field(ge=0)] | None = None
    kv_folder: Path | None = None
    kv_folder_limit: Annotated[ByteSize, Field(ge=0)] | None = None
    prefix_cache: Annotated[ByteSize, Field(ge=0)] = ByteSize(256 * MIB)
    kv_store: Path | None = None
    kv_store_limit: Annotated[ByteSize, Field(ge=0)] | None = None
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
    ray: bool = False
    replicas: Annotated[int, Field(ge=1)] = 1

    @field_validator("api_keys", "warm", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """The environment has them with commas between."""
        return [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else given

    @field_validator("kv_host_memory", "kv_folder", "kv_folder_limit")
    @classmethod
    def _tell_base(cls, given: Any, told: ValidationInfo) -> Any:
        """These are of what others leave over, which must be told, too."""
        base = "kv_folder" if told.field_name == "kv_folder_limit" else "kv_memory"
        if given is not None and base in told.data and told.data[base] is None:
            what = "the files there" if base == "kv_folder" else "what does not fit on the device"
            raise ValueError(f"it is for {what}; set {base}, too")
        return given

    @property
    def served_name(self) -> str:
        """What clients call the model: ``name``, or the last part of its path."""
        return self.name or Path(self.model).name

    def tiers(self, device: torch.device) -> KVMemory | None:
        """Where keys and values lie, if not on the device alone. Every tier has a limit; one that is not named is a
        share of what is free.

        Raises:
            OSError: if no file can be made in the folder.
        """
        if self.kv_memory is None or (self.kv_host_memory is None and self.kv_folder is None):
            return None
        here, host, file = int(self.kv_memory), self.kv_host_memory, 0
        if host is None:
            free = free_memory(torch.device("cpu")) - (here if device.type == "cpu" else 0)
            host = ByteSize(max(0, int(self._share(torch.device("cpu")) * free)))
        if self.kv_folder is not None:
            limit, free = self.kv_folder_limit, free_disk(self.kv_folder)
            file = int(self._share(torch.device("cpu")) * free) if limit is None else int(limit)
        return KVMemory(here, int(host), self.kv_folder, file=file)

    def limits(self, device: torch.device) -> Limits:
        """Of the scheduler; memory that is not named is a share of what is free on the device."""
        memory = self.kv_memory or int(self._share(device) * free_memory(device))
        return Limits(int(memory), self.rows, self.waiting, self.step)

    def _share(self, device: torch.device) -> float:
        """Of what is free, this process's: replicas may be on one machine, but each has a GPU of its own."""
        return SHARE / self.replicas if device.type == "cpu" else SHARE


def read_settings(flags: Mapping[str, Any], file: Path | None = None) -> ServerSettings:
    """Settings from flags, the environment and a file, in this order.

    Args:
        flags: those that were given.
        file: in TOML; None for none.

    Raises:
        ValueError: names each wrong setting, without the value, which may be a key; or for a file that is not TOML.
        FileNotFoundError: if there is no such file.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(2, "there is no such settings file", str(file))

    class Sourced(ServerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            told = () if file is None else (TomlConfigSettingsSource(settings_cls, file),)
            return init_settings, env_settings, *told

    try:
        return Sourced(**flags)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_input=False)]
        raise ValueError(f"settings: {'; '.join(wrong)}") from None


def free_disk(folder: Path) -> int:
    """Bytes that are free where files are to be made; the folder is made if it is not there.

    Raises:
        OSError: if no file can be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return shutil.disk_usage(folder).free


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; in host memory, those that can be had without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
