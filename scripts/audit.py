"""Asks the OSV database for known vulnerabilities of every package that a lock names.

It needs nothing but Python: a tool that audits packages should not bring thirty of its own. The exit code is 0 if every
package was audited and none is vulnerable, 1 if one is, and 2 if nothing was audited.

The database must first prove that it knows the vulnerabilities of an old release. Some mirrors of PyPI return an empty
list for each package, or "not found". pip-audit 2.10 then reports "No known vulnerabilities found" and exits with 0.
"""

import argparse
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SERVICE = "https://api.osv.dev"
LOCKS = {
    "requirements.lock": "in the image and in each installation",
    "requirements-image.lock": "builds the image",
    "requirements-dev.lock": "on the machines of developers and of the CI",
    "bench/requirements.lock": "only in the bench",
}
ACCEPTED: dict[str, str] = {}
"""Vulnerabilities that gpumap may have: the id, and the reason why it does not matter here."""
ANSWER_SECONDS = 60.0


class Package(NamedTuple):
    name: str
    version: str


VULNERABLE = Package("aiohttp", "3.9.0")
"""A database without a vulnerability of this release (CVE-2024-23334 and others) has none at all."""


class NothingAuditedError(Exception):
    """No database answered for all packages."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--service", default=SERVICE, help="a server with OSV's API, version 1 (%(default)s)")
    parser.add_argument("locks", nargs="*", default=[*LOCKS], metavar="LOCK", help="else all: %(default)s")
    args = parser.parse_args()
    locked = {name: locked_packages((ROOT / name).read_text(encoding="utf-8")) for name in args.locks}
    try:
        known = known_vulnerabilities(
            args.service, sorted({package for packages in locked.values() for package in packages})
        )
    except NothingAuditedError as error:
        print(f"Nothing was audited: {error}.", file=sys.stderr)
        return 2
    open_ones = 0
    for lock, packages in locked.items():
        print(f"{lock} ({LOCKS.get(lock, 'a lock')}): {len(packages)} packages")
        for package in packages:
            for vulnerability in known[package]:
                accepted = ACCEPTED.get(vulnerability)
                open_ones += accepted is None
                print(
                    f"  {package.name} {package.version}: {vulnerability}"
                    + (f", accepted: {accepted}" if accepted else f", {SERVICE.replace('api.', '')}/{vulnerability}")
                )
    print("A package is vulnerable." if open_ones else "No known vulnerability.")
    return 1 if open_ones else 0


def locked_packages(lock: str) -> tuple[Package, ...]:
    """The packages of a lock, also those that only other platforms or versions of Python install."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE)
    return tuple(Package(name, version) for name, version in found)


def known_vulnerabilities(service: str, packages: Sequence[Package]) -> Mapping[Package, Sequence[str]]:
    """Return the ids of the vulnerabilities of each package. Raises NothingAuditedError."""
    questions = [VULNERABLE, *packages]
    if not packages:
        raise NothingAuditedError("the locks name no package")
    queries = [
        {"package": {"ecosystem": "PyPI", "name": package.name}, "version": package.version} for package in questions
    ]
    request = urllib.request.Request(
        f"{service}/v1/querybatch",
        data=json.dumps({"queries": queries}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            results = json.load(answer)["results"]
        found = [sorted(each["id"] for each in one.get("vulns") or ()) for one in results]
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NothingAuditedError(f"{service} does not answer: {reason}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NothingAuditedError(f"{service} does not answer in OSV's format") from error
    if len(found) != len(questions):
        raise NothingAuditedError(f"{service} answers for {len(found)} of {len(questions)} packages")
    if not found[0]:
        name, version = VULNERABLE
        raise NothingAuditedError(
            f"{service} does not know the vulnerabilities of {name} {version}: it has none at all"
        )
    return dict(zip(packages, found[1:], strict=True))


if __name__ == "__main__":
    sys.exit(main())
