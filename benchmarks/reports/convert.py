"""Rewrite each stored report in schema version 2: python convert.py [--check]."""
import gzip, sys, zlib
from pathlib import Path
import msgspec
from pytest_llmgpu.report import file
paths=[p for f in ("benchmarks/reports","benchmarks/paper/results") for p in sorted(Path(f).glob("*.json.gz"))]
for p in paths:
    raw=gzip.decompress(p.read_bytes()); v=msgspec.json.decode(raw)["schema_version"]
    r=file.load(p)
    if v==2: continue
    r.schema_version=2
    file.dump(r,p)
    again=file.load(p)
    assert msgspec.json.encode(again)==msgspec.json.encode(r)
    print(p, v,'->', again.schema_version, len(raw), len(gzip.decompress(p.read_bytes())))
