"""What the Linux kernel keeps a process from: files by Landlock, the network by a namespace.

Only the standard library is used: this runs in the process that is about to be confined.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ABI_QUESTION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGES = sum(1 << bit for bit in range(4, 13))
"""Removing and making entries of every kind."""
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES = 38
_CAPABILITIES_VERSION = 0x20080522
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The version of Landlock this kernel has; 0: none."""
    return max(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ABI_QUESTION), 0)


def leave_network(*, loopback: bool) -> None:
    """Take this process out of the network; with `loopback` it still reaches itself.

    Raises:
        OSError: the kernel does not let this user.
    """
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEW_USER | _NEW_NETWORK), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    if loopback:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            name = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack_from("16xH", fcntl.ioctl(end, _GET_FLAGS, name))
            fcntl.ioctl(end, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def restrict_files(read: Iterable[str], write: Iterable[str]) -> None:
    """Leave this process only these files and folders, signals to its own kind, and no capability.

    What does not exist is passed over. Root could else make a device in its folder and write there
    what it may not write elsewhere, or raise its limits.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = landlock_version()
    if version == 0:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    everything = _READ | _WRITE_FILE | _CHANGES
    everything |= _REFER if version >= 2 else 0
    everything |= _TRUNCATE if version >= 3 else 0
    everything |= _IOCTL_DEV if version >= 5 else 0
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", everything, 0, scopes)
    size = 24 if version >= 6 else 8
    ruleset = _check(
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "landlock"
    )
    try:
        for paths, rights in ((read, _READ), (write, everything)):
            for path in paths:
                _allow(ruleset, path, rights & everything)
        _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
        header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)  # 0: this process
        _check(_libc.capset(header, bytes(24)), "capset")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # this user cannot reach it anyway
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, beneath)
        _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock: {path}")
    finally:
        os.close(beneath)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
