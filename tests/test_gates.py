"""The gates: digests of machine code, plans in files, and what compares two of them."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyphase.__main__ import app
from polyphase.bench import gates, kernels, plans
from polyphase.bench.layers import NamedLayer, parse_layer
from polyphase.jit import compiler, cubin
from polyphase.jit.source import KernelSource
from polyphase.plan.planner import kernel_sources
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo

LAYER = "2x4x7x9 -> 6, k=3, s=2, p=1"
DEVICE = DeviceInfo.for_arch("sm_90a")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# Machine code.


def elf(*sections: tuple[str, bytes]) -> bytes:
    """A 64-bit little-endian ELF file of these sections and the table of their names."""
    names, body, headers = b"\0", b"", [bytes(64)]
    for name, contents in (*sections, (".shstrtab", b"")):
        start = len(names)
        names += name.encode() + b"\0"
        contents = contents or names
        headers.append(struct.pack("<2I6Q", start, 1, 0, 0, 64 + len(body), len(contents), 0, 0) + bytes(8))
        body += contents
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<3H", 64, len(headers), len(headers) - 1)
    return head + body + b"".join(headers)


def test_a_digest_is_of_code_and_its_constants_alone() -> None:
    first = cubin.code_digest(elf((".text.one", b"code"), (".nv.constant2.one", b"data"), (".debug", b"a")))
    renamed = elf(
        (".nv.info.two", b"b"), (".nv.constant2.two", b"data"), (".text.two", b"code"), (".nv.constant0", b"x")
    )
    assert cubin.code_digest(renamed) == first
    assert cubin.code_digest(elf((".text.one", b"edoc"), (".nv.constant2.one", b"data"))) != first
    assert cubin.code_digest(elf((".text.one", b"code"), (".nv.constant2.one", b"atad"))) != first
    assert cubin.code_digest(elf((".text.one", b"data"), (".nv.constant2.one", b"code"))) != first


def test_a_digest_does_not_depend_on_the_order_of_functions() -> None:
    one, two = (".text.one", b"1"), (".text.two", b"2")
    assert cubin.code_digest(elf(one, two)) == cubin.code_digest(elf(two, one)) != cubin.code_digest(elf(one))


@pytest.mark.parametrize("file", [b"", b"MZ", elf((".text.one", b"1"))[:-64], elf((".data", b"1"))])
def test_what_is_no_kernel_has_no_digest(file: bytes) -> None:
    with pytest.raises(ValueError, match="the binary"):
        cubin.code_digest(file)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.WEIGHT_GRAD])
def test_names_and_comments_are_not_in_a_kernels_digest(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    source = kernel_sources(parse_layer(LAYER), pass_, DEVICE)[-1]
    digest = compiler.resources_of(source, "sm_90a").digest
    text = source.text
    assert f" {source.kernel}(" in text

    def changed(found: str) -> str:
        monkeypatch.setitem(source.__dict__, "text", found)
        return compiler.resources_of(source, "sm_90a").digest

    names = text.replace(f" {source.kernel}(", " renamed(").replace("MIN_BLOCKS", "RESIDENT_BLOCKS")
    assert changed(f"// a comment\nconstexpr int UNUSED = 3;\n\n{names}") == digest
    assert changed(text.replace(" += ", " -= ")) != digest


# Files, and what they differ in.


def row(**values: str) -> gates.Row:
    return {"arch": "sm_90a", "pass": "forward", "problem": LAYER, "digest": "a", "kernel": "gather", **values}


def planned(**values: str) -> gates.Row:
    return {
        "arch": "sm_90a",
        "pass": "forward",
        "problem": LAYER,
        "algorithm": "gather",
        "config": "lanes=4",
        **values,
    }


def kinds(comparison: gates.Comparison) -> list[str]:
    return [change.kind for change in comparison.changes]


def test_kernels_are_compared_as_a_set_and_by_no_name() -> None:
    before = [row(), row(digest="b"), row(digest="b", role="chosen")]
    after = [row(digest="b", kernel="collect"), row(kernel="collect")]
    assert gates.compare(before, after) == gates.Comparison(2, (), ("digest", "registers", "shared"))


def test_changed_missing_and_new_are_told_apart() -> None:
    other = {"problem": "another"}
    assert kinds(gates.compare([row()], [row(digest="b")])) == ["changed"]
    assert kinds(gates.compare([row()], [row(registers="9")])) == ["changed"]
    assert kinds(gates.compare([row(), row(**other)], [row()])) == ["missing"]
    assert kinds(gates.compare([row()], [row(), row(**other)])) == ["new"]
    assert kinds(gates.compare([row(), row(**other)], [row()], part=True)) == []
    assert kinds(gates.compare([row(), row(digest="b")], [row()], part=True)) == ["missing"]


def test_names_of_algorithms_count_unless_they_are_said_to_be_new() -> None:
    before, after = [planned(other="gather")], [planned(algorithm="direct", other="direct", config="threads=4")]
    assert kinds(gates.compare(before, after)) == ["changed"]
    assert kinds(gates.compare(before, after, names={"gather": "direct", "lanes": "threads"})) == []
    assert kinds(gates.compare(before, after, ignored=["algorithm", "config", "other"])) == []
    assert kinds(gates.compare([planned(planning="0.1")], [planned(planning="0.2")])) == []


def test_what_cannot_be_compared_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(gates.GateError, match=r"different compilers: nvrtc 13\.0, nvrtc 13\.5"):
        gates.compare([row(compiler="nvrtc 13.0")], [row(compiler="nvrtc 13.5")])
    with pytest.raises(gates.GateError, match="the other plans"):
        gates.compare([row()], [planned()])
    with pytest.raises(gates.GateError, match="colour: the columns are arch"):
        gates.compare([row()], [row()], ["colour"])
    file = tmp_path / "file.csv"
    for text, told in (
        ("", "no lines"),
        ("a,b\n1,2\n", "neither"),
        ("arch,pass,problem,digest\n1,2\n", "too many or too"),
    ):
        file.write_text(text)
        with pytest.raises(gates.GateError, match=told):
            gates.read(file)
    with pytest.raises(gates.GateError, match="cannot be read"):
        gates.read(tmp_path / "none.csv")
    file.write_text("arch,pass,problem,algorithm,variant,other variant\na,b,c,d,e,f\n")
    assert (gates.read(file)[0]["config"], gates.read(file)[0]["other config"]) == ("e", "f")  # older names
    file.write_text("old\n")
    with pytest.raises(gates.GateError, match="an old name, a comma and the new name"):
        gates.read_names(file)


def test_diff_prints_what_differs_and_ends_with_1(tmp_path: Path) -> None:
    before, after, names = tmp_path / "before.csv", tmp_path / "after.csv", tmp_path / "names"
    gates.write(before, gates.PLANS, [planned(seconds="1e-05")])
    gates.write(after, gates.PLANS, [planned(seconds="2e-05", algorithm="direct"), planned(problem="another")])
    names.write_text("gather, direct\n")
    assert invoke("diff", before, before).output.split() == ["1", "lines", "are", "equal"]
    result = invoke("diff", before, after, "--names", names)
    assert result.exit_code == 1
    assert "seconds: 1e-05 → 2e-05" in result.output
    assert "algorithm: " not in result.output
    assert "new: sm_90a, forward, another" in result.output
    assert "0 lines are equal, 2 problems differ" in result.output
    assert "and 2 problems more" in invoke("diff", before, after, "--show", "0").output
    assert invoke("diff", before, tmp_path / "none.csv").exit_code == 2


# What is written.


def test_digests_do_not_depend_on_the_order_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resources_of(source: KernelSource, arch: str) -> compiler.Resources:
        return compiler.Resources(64, 0, 0, 0, (), 0.1, source, digest=f"{hash(source):x}")

    monkeypatch.setattr(kernels, "resources_of", resources_of)
    monkeypatch.setattr(kernels, "compiler_version", lambda: "nvrtc 13.5")
    layers = [NamedLayer("one", parse_layer(LAYER)), NamedLayer("two", replace(parse_layer(LAYER), batch=9))]
    for name, order in (("one", layers), ("two", layers[::-1])):
        wanted = kernels.wanted(order, [Pass.FORWARD, Pass.WEIGHT_GRAD], ["float32"], [False], [DEVICE])
        kernels.write_digests(tmp_path / name, kernels.compile_all(wanted, 2))
    first, second = ((tmp_path / name).read_text() for name in ("one", "two"))
    assert first == second
    found = gates.read(tmp_path / "one")
    assert {row["role"] for row in found} == {"chosen", "offered"}
    assert {row["problem"] for row in found} == {
        str(replace(layer.problem, tf32=tf32)) for layer in layers for tf32 in (False, True)
    }


def test_compile_writes_digests(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    file = tmp_path / "digests.csv"
    result = invoke(
        "compile", "--arch", "sm_80", "--layer", "2x4x7 -> 6, k=3", "--dtypes", "float64", "--layouts", "nchw",
        "--passes", "forward", "--digests", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = gates.read(file)
    assert all(len(row["digest"]) == 64 and row["compiler"].startswith("nvrtc ") for row in found)
    assert len({row["digest"] for row in found}) == len(found) > 1


@pytest.mark.slow
def test_plans_are_a_line_for_each_choice(tmp_path: Path) -> None:
    file, again = tmp_path / "plans.csv", tmp_path / "again.csv"
    options = ("--arch", "sm_80,sm_90a", "--layer", LAYER, "--random", 2, "--dtypes", "float32,float64")
    options = (*options, "--passes", "weight_grad,forward", "--layouts", "nchw")
    assert invoke("plans", "--csv", file, *options).exit_code == 0
    found = gates.read(file)
    of_the_layer = [row for row in found if row["layer"] == LAYER]
    assert len(of_the_layer) == 2 * 2 * 3  # architectures, passes, float32 twice and float64
    assert len(found) - len(of_the_layer) == 2 * 2 * 2  # architectures, passes, layers in one dtype and format each
    assert all(float(row["seconds"]) > 0 and row["grid"].count("x") == 2 for row in found)
    result = invoke("plans", "--csv", again, *options, "--cold")
    assert "a cold forward plan takes" in result.output
    assert all(float(row["planning"]) >= 0 for row in gates.read(again))
    assert invoke("diff", file, again).exit_code == 0


@pytest.mark.slow
def test_plans_in_processes_are_the_same() -> None:
    layers = [NamedLayer(str(batch), replace(parse_layer(LAYER), batch=batch)) for batch in range(1, 33)]
    cases = plans.cases(layers, [Pass.WEIGHT_GRAD], ["float64"], [False], [DEVICE])
    assert list(plans.rows(cases, 2)) == list(plans.rows(cases, 1))


def test_what_no_algorithm_computes_is_a_line(tmp_path: Path) -> None:
    huge = ConvTransposeProblem.make((1, 1, 2**31), 1, 1)
    [[found]] = plans.rows(
        plans.cases([NamedLayer("huge", huge)], [Pass.FORWARD], ["float32"], [False], [DEVICE])[:1], 1
    )
    assert found["algorithm"] == "refused"


def test_rankings_on_disk_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("POLYPHASE_TUNING", "1")
    layer = "--layer", "3x5x8x8 -> 7, k=3", "--dtypes", "bfloat16", "--layouts", "nchw", "--arch", "sm_90a"
    assert invoke("plans", "--csv", tmp_path / "plans.csv", *layer).exit_code == 0
    assert not (tmp_path / "cache").exists()
