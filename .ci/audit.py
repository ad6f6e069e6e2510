"""Looks the installed packages up in the database of known vulnerabilities, with pip-audit.

Exits with 1 if a package has a known vulnerability that another version mends. Where the database cannot be reached,
the scan is skipped, and says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

OPTIONS = ("--local", "--skip-editable", "--format", "json", "--progress-spinner", "off", "--timeout", "15")


def verdict(output: str, errors: str) -> tuple[int, str]:
    """The exit code and the message for what pip-audit printed."""
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except ValueError:
        reason = (errors.strip().splitlines() or ["it gave no reason"])[-1]
        return 0, f"SKIPPED, nothing was scanned: the database of vulnerabilities cannot be reached ({reason})"
    scanned = [package for package in packages if "vulns" in package]
    if not scanned:
        return (
            0,
            f"SKIPPED, nothing was scanned: the database cannot be reached; it knew none of {len(packages)} packages",
        )
    found = [
        f"  {package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in scanned
        for vulnerability in package["vulns"]
    ]
    can_be_mended = any(vulnerability["fix_versions"] for package in scanned for vulnerability in package["vulns"])
    summary = f"{len(scanned)} of {len(packages)} packages scanned, {len(found)} known vulnerabilities"
    return int(can_be_mended), "\n".join([summary, *found])


def main() -> int:
    """Scan, and print the verdict."""
    done = subprocess.run([sys.executable, "-m", "pip_audit", *OPTIONS], capture_output=True, text=True)
    code, message = verdict(done.stdout, done.stderr)
    sys.stdout.write(f"papa: dependencies: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
