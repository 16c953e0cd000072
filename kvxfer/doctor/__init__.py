"""``kvxfer doctor``: what will go wrong on this machine, before it does.

Every check has two halves.  One looks (files, sockets, child processes) and gives facts, plain data; the other judges
facts and is a pure function of them.  No check compares the clocks of two machines.

==================== ===========================================================================================
:mod:`.findings`     what a check says: what, why it matters, what to do
:mod:`.checks`       which checks there are, and their order
:mod:`.library`      NIXL, UCX and its modules, torch
:mod:`.ucxlog`       what UCX says in its log
:mod:`.agent`        the child processes with NIXL agents of their own
:mod:`.probe`        starts them, and ends them in every case
:mod:`.transport`    the transport that two agents on this host get
:mod:`.ucx`          the UCX variables of the environment
:mod:`.processes`    namespaces, ptrace, capabilities
:mod:`.limits`       locked memory
:mod:`.memory`       the directories that caches lie in
:mod:`.network`      interfaces
:mod:`.peer`         another sidecar's peer port
:mod:`.ports`        what the sidecar wants to listen at
:mod:`.certificates` TLS files
:mod:`.gpu`          NVIDIA's driver, and how a NIC gets at its memory
==================== ===========================================================================================
"""
