"""UCX's log, as UCX 1.23 writes it."""

from __future__ import annotations

from kvxfer.doctor import ucxlog

HEAD = "[1795997459.534970] [vm:15015:0] "

READ_BY = """\
  +--------+-------------+-----------------------------------+
  | r {place} cfg#{number}                                   |
  | {title} |
  +--------+-------------+-------------------------------------------+
  | Range  | Description |                  Config                   |
  +--------+-------------+-------------------------------------------+
{rows}
  +--------+-------------+-------------------------------------------+
"""
READ = "remote memory read by ucp_get*(multi) into host memory from host"


def box(*rows: tuple[str, str, str], place: str = "intra-node", title: str = READ) -> str:
    lines = "\n".join(f"  | {' | '.join(row)} |" for row in rows)
    text = READ_BY.format(place=place, number=1, title=title, rows=lines)
    return "".join(f"{HEAD}{line}\n" for line in text.splitlines())


def test_the_way_of_a_read() -> None:
    log = (
        "something of NIXL's\n"
        + box(("0..inf", "zero-copy", "self/memory"), place="self")
        + box(("0..inf", "short", "tcp/lo"), title="active message by ucp_am_send* from host memory")
        + box(("0..8000", "software emulation", "tcp/lo"), ("8001..inf", "zero-copy", "cma/memory"))
    )
    assert ucxlog.read_paths(log) == (
        ucxlog.ReadPath("0..8000", "software emulation", ("tcp/lo",)),
        ucxlog.ReadPath("8001..inf", "zero-copy", ("cma/memory",)),
    )
    assert ucxlog.read_paths("") == ()


def test_lanes_of_a_read_over_several_devices() -> None:
    config = "52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1"
    (path,) = ucxlog.read_paths(box(("0..inf", "zero-copy", config), place="inter-node"))
    assert path.lanes == ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")


def test_what_there_is_instead_of_what_was_asked_for() -> None:
    log = (
        f"{HEAD}    ucp_context.c:1508 UCX  WARN  network device 'x0' is not available, please use one or more of: "
        "'eth0'(tcp), 'mlx5_0:1'(ib)\n"
        f"{HEAD}    ucp_context.c:1508 UCX  WARN  transport 'y' is not available, please use one or more of: cma, tcp\n"
    )
    assert ucxlog.devices(log) == {"eth0": "tcp", "mlx5_0:1": "ib"}
    assert ucxlog.transports(log) == ("cma", "tcp")
    assert ucxlog.unavailable(log) == (("network device", "x0"), ("transport", "y"))
    assert ucxlog.devices("") is None
    assert ucxlog.transports("") is None


def test_unused_variables() -> None:
    log = (
        f"{HEAD}   parser.c:2578 UCX  WARN  unused environment variables: UCX_NONE; UCX_TLSS (maybe: UCX_TLS?)\n"
        f"{HEAD}   parser.c:2578 UCX  WARN  unused environment variable: UCX_SIZ (maybe: UCX_A_SIZE, UCX_B_SIZE?)\n"
        f"{HEAD}   parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)\n"
    )
    assert ucxlog.unused(log) == {"UCX_NONE": "", "UCX_TLSS": "UCX_TLS", "UCX_SIZ": "UCX_A_SIZE, UCX_B_SIZE"}


def test_errors_are_told_once() -> None:
    line = f"{HEAD}   parser.c:1558 UCX  ERROR Invalid value for RX_SEG_SIZE: 'abc'. Expected: memory units\n"
    assert ucxlog.problems(line + line) == ("Invalid value for RX_SEG_SIZE: 'abc'. Expected: memory units",)
    assert ucxlog.problems("E1130 00:11:25 nixl_agent.cpp:371] createBackend failed\n") == ()


def test_modules() -> None:
    paths = ["/a/libuct_ib_mlx5.so.0.0.0", "/a/libuct_cma.so", "/a/libuct_cma.la", "/a/libucp-b39b3ed9.so.0.0.0"]
    assert ucxlog.modules(paths) == ("cma", "ib_mlx5")
