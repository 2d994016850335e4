"""Pseudonyms for the names of a node: equal for equal names, of the same length and form, and not reversible.

Each recording has a new random key, which is never written. Hexadecimal ids are mapped digit by digit, each by all the
digits before it (as Crypto-PAn does with addresses). So two ids never become one, and the beginning of an id stays its
beginning. Names are drawn letter by letter and remembered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial

KEPT_NAMESPACES = frozenset(
    {"default", "kube-system", "kube-public", "kube-node-lease", "kai-resource-reservation", "runai-reservation"}
)
"""Those of Kubernetes, and those by which gpumap knows the reservations of schedulers."""
KEPT_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        kubepods kubelet besteffort burstable guaranteed pod pods system user session app init slice scope service
        gpumap docker cri containerd crio conmon libpod podman lxc payload container containers default machine deleted
        nerdctl incus monitor htcondor pbs jobs jobid slurm slurmd slurmstepd job step task uid batch extern interactive
        special
        GPU MIG gpu mig vfio core memory tencent com vcuda nvidia all tegra none void vgpu mps dev tmp run
        cdi k8s io device plugin volcano sh index ids new node management runtime compute utility graphics video
        nvidiactl uvm tools modeset caps dri nvswitch var devices
        """,
    )
)
"""Words of ids, cgroups and plugins that identify no one."""
KEPT_COMMS = re.compile(
    r"nvidia-(?:smi|persiste|cuda-mps|modeset/|powerd|imex|settings)|nv-fabricmanage|python[0-9]?(?:\.[0-9]{1,2})?|Xorg"
    r"|slurmstepd|kthreadd"
)
"""Programs of NVIDIA's driver, as the kernel cuts their names at 15 characters (nvidia-persistenced, nv-fabricmanager,
nvidia-cuda-mps-control and -server), three that are everywhere, and PID 2 of a machine.
"""
KEPT_CONTROLLERS = frozenset(
    re.findall(
        r"\w+",
        """
        cpu cpuacct cpuset memory devices freezer net cls prio blkio pids hugetlb perf event rdma misc name systemd
        """,
    )
)
"""Words of the kernel's controllers (net_cls, net_prio, perf_event), and systemd's hierarchy."""

_LETTERS = "bcdfghjkmnpqrstvwxz"
"""Without vowels they form no words. The ids of Slurm have no L."""
_SLUID = re.compile(r"s[0-9A-Z]{13}")
_UUID = r"[0-9a-fA-F]{8}(?:[-_][0-9a-fA-F]{4}){3}[-_][0-9a-fA-F]{12}"
_HEX = re.compile(rf"(?<![0-9a-zA-Z])(pod)?({_UUID}|[0-9a-fA-F]{{12,64}})(?![0-9a-zA-Z])")
_WORD = re.compile(r"(?<![\w.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w.])|[^-/._:=,;@()+ ]+", re.ASCII)
"""An address, or the text between the punctuation of ids and paths. No symbol is left."""
_AMOUNT = re.compile(
    r"[0-9]{1,7}[kKmMgG]?|268435456|(?:gi|vgpu|nvidia|renderD|card|cap)[0-9]{1,4}|[1-7][cg]|(?:[1-7]g)?[0-9]{1,3}gb"
)
"""Numbers in ids: a replica's, a GPU's, vcuda's MiB, a MIG profile's."""
_ATTEMPTS = 200


class Pseudonyms:
    """The pseudonyms of one recording."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: dict[tuple[str, str], str] = {}
        self._taken: set[tuple[str, str]] = set()
        kinds = ("pod", "container", "node", "claim")
        self.pod, self.container, self.node, self.claim = (partial(self._name, kind) for kind in kinds)

    def namespace(self, name: str) -> str:
        return name if name in KEPT_NAMESPACES else self._name("namespace", name)

    def comm(self, name: str) -> str:
        return name if KEPT_COMMS.fullmatch(name) else self._name("comm", name)

    def uid(self, uid: str) -> str:
        """Return a pod's UID: a UUID, or a static pod's hash. Anything else is a name."""
        match = re.fullmatch(rf"{_UUID}|[0-9a-fA-F]{{12,64}}", uid)
        return self._hex(uid) if match else self._name("uid", uid)

    def container_id(self, id_: str) -> str:
        """A container's id, also one that was cut off."""
        return self._hex(id_)

    def device(self, id_: str) -> str:
        """Return a device id, or a text with ids: uuids and bus addresses in it become others, the form stays."""
        if re.fullmatch(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", id_):
            return id_
        return self._text(id_, lambda word: word in KEPT_WORDS or _AMOUNT.fullmatch(word) is not None)

    def cgroup(self, path: str) -> str:
        """Return a cgroup's path: ids in it become others, and so do words and numbers that are not common."""
        return self._text(path, lambda word: word in KEPT_WORDS)

    def controllers(self, text: str) -> str:
        """Return the controllers of a line of `cgroup`. A private hierarchy has a private name."""
        return self._text(text, lambda word: word in KEPT_CONTROLLERS)

    def _text(self, text: str, keeps: Callable[[str], bool]) -> str:
        def renamed_word(match: re.Match[str]) -> str:
            if keeps(match[0]):
                return match[0]
            if _SLUID.fullmatch(match[0]):  # Slurm's id of a job keeps its form
                return f"s{self._name('sluid', match[0][1:])}"
            return self._name("word", match[0])

        done, parts = 0, []
        for match in _HEX.finditer(text):
            parts += [_WORD.sub(renamed_word, text[done : match.start()]), match[1] or "", self._hex(match[2])]
            done = match.end()
        return "".join((*parts, _WORD.sub(renamed_word, text[done:])))

    def _hex(self, text: str) -> str:
        """Each digit moves by a number that follows from those before it. Dashes do not count, capitals stay so."""
        digits, out = "", []
        for character in text:
            if character in "-_":
                out.append(character)
                continue
            moved = format((int(character, 16) + self._number("hex", digits)[0]) % 16, "x")
            digits += character.lower()
            out.append(moved.upper() if character.isupper() else moved)
        return "".join(out)

    def _name(self, kind: str, name: str) -> str:
        """Return letters for letters and digits for digits. It is longer only if all names of this length are used."""
        if not name:
            return name
        known = self._names.get((kind, name))
        attempt = 0
        while known is None:
            drawn = self._drawn(kind, f"{attempt} {name}", name + "x" * (attempt // _ATTEMPTS))
            attempt += 1
            if (kind, drawn) not in self._taken and drawn != name and not _means_something(drawn):
                known = self._names[kind, name] = drawn
                self._taken.add((kind, drawn))
        return known

    def _drawn(self, kind: str, seed: str, form: str) -> str:
        out: list[str] = []
        for place, character in enumerate(form):
            number = int.from_bytes(self._number(kind, f"{place} {seed}")[:4])
            if character in "-._":
                out.append(character)
            elif character in "0123456789":
                out.append(str(number % 10))
            else:
                letter = _LETTERS[number % len(_LETTERS)]
                out.append(letter.upper() if character.isupper() else letter)
        return "".join(out)

    def _number(self, kind: str, seed: str) -> bytes:
        return hashlib.blake2b(f"{kind} {seed}".encode(errors="surrogatepass"), key=self._key, digest_size=8).digest()


def _means_something(word: str) -> bool:
    """Return whether a word is kept: otherwise two would become one, or a name an amount. Numbers become numbers."""
    is_amount = _AMOUNT.fullmatch(word) is not None and not word.isdigit()
    return is_amount or word in KEPT_NAMESPACES or word in KEPT_WORDS
