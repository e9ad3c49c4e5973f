"""Programs that try to harm a rollout server from inside the sandbox.

`ATTACKS` maps a name to Python code. The code raises OSError if it is refused. `victim` holds what it attacks: files,
processes and sockets of the user that the server runs as. Every attack works without a sandbox, which the tests check
first: an attack that cannot succeed would prove nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
ORDINARY_USER = 54322
"""A user without an account, for the tests that root runs as somebody else. It is not that of .ci/as-ordinary-user,
whose processes would count where the kernel counts those of a user."""
TIMEOUT_S = 200.0
BATCH = r"""
import ctypes, fcntl, json, mmap, os, platform, resource, signal, socket, struct, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
request = json.loads(sys.stdin.readline())

def call(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attempt(code, name):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, globals() | {"victim": request["victims"][name]})
            report = "succeeded"
        except BaseException as error:
            report = f"{type(error).__name__}: {error}"
        os.write(write, report.encode())
        os._exit(0)
    os.close(write)
    report = os.read(read, 4096).decode() or "killed"
    os.close(read)
    os.waitpid(pid, 0)
    return report

reports = {}
for name, code in request["attacks"].items():
    reports[name] = attempt(code, name)
print(json.dumps(reports))
"""
"""Runs each attack in a child process and prints a report of each."""

FILES = {
    "read a file": "open(victim['file']).read()",
    "write a file": "open(victim['file'], 'a').write('x')",
    "create a file": "open(victim['folder'] + '/new', 'w')",
    "remove a file": "os.unlink(victim['file'])",
    "rename a file": "os.rename(victim['file'], victim['file'] + '-moved')",
    "make a folder": "os.mkdir(victim['folder'] + '/new')",
    "link a file": "os.link(victim['file'], victim['folder'] + '/linked')",
    "make a symlink": "os.symlink('/', victim['folder'] + '/root')",
    "read through a symlink": """
link = tempfile.mkdtemp() + '/link'
os.symlink(victim['file'], link)
open(link).read()
""",
    "list a folder": "os.listdir(victim['folder'])",
    "chmod a file": "os.chmod(victim['file'], 0o777)",
    "chmod a folder": "os.chmod(victim['folder'], 0)",
    "chmod from a folder": "os.chmod('file', 0o777, dir_fd=os.open(victim['folder'], os.O_PATH))",
    "fchmodat2": "call(452, 452, -100, victim['file'].encode(), 0o777, 0)",
    "chown a file": "os.chown(victim['file'], -1, os.getgid())",
    "set the times of a file": "os.utime(victim['file'], (0, 0))",
    "set an attribute of a file": "os.setxattr(victim['file'], 'user.harm', b'x')",
    "remove an attribute of a file": "os.removexattr(victim['file'], 'user.mark')",
    "truncate a file": "os.truncate(victim['file'], 0)",
    "truncate by opening": "os.open(victim['file'], os.O_RDONLY | os.O_TRUNC)",
    "open without an access mode": "os.open(victim['file'], 3)",
    "watch a folder": "call(254, 27, libc.inotify_init1(0), victim['folder'].encode(), 2)",
    "watch by dnotify": "fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, 2)",
    "watch by fanotify": "call(300, 262, 0x200, 0)",
    "get the handle of a file": """
handle = ctypes.create_string_buffer(struct.pack('<Ii', 128, 0) + bytes(128))
call(303, 264, -100, victim['file'].encode(), handle, ctypes.byref(ctypes.c_int()), 0)
""",
    "read /etc/passwd": "open('/etc/passwd').read()",
    "write to /tmp of the host": "open(victim['folder'] + '/../escaped', 'w')",
    "stat a file": "os.stat(victim['file'])",
    "find out whether a file exists": "assert os.access(victim['file'], os.F_OK)",
}

PROCESSES = {
    "kill": "os.kill(victim['pid'], 15)",
    "kill its group": "os.killpg(victim['pid'], 15)",
    "tkill": "call(200, 130, victim['pid'], 15)",
    "tgkill": "call(234, 131, victim['pid'], victim['pid'], 15)",
    "queue a signal": """
info = ctypes.create_string_buffer(struct.pack('<iii', 15, 0, -1) + bytes(116))
call(129, 138, victim['pid'], 15, info)
""",
    "queue a signal to a thread": """
info = ctypes.create_string_buffer(struct.pack('<iii', 15, 0, -1) + bytes(116))
call(297, 240, victim['pid'], victim['pid'], 15, info)
""",
    "signal by pidfd": "signal.pidfd_send_signal(os.pidfd_open(victim['pid']), 15)",
    "signal by F_SETOWN": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, victim['pid'])
fcntl.fcntl(r, fcntl.F_SETSIG, 15)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')
""",
    "signal by F_SETOWN and SIGIO": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, victim['pid'])
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')
""",
    "signal by F_SETOWN_EX": """
r, w = os.pipe()
fcntl.fcntl(r, 15, struct.pack('ii', 1, victim['pid']))
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')
""",
    "signal by FIOASYNC": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, victim['pid'])
fcntl.ioctl(r, 0x5452, struct.pack('i', 1))
os.write(w, b'x')
""",
    "signal by FIOSETOWN": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack('i', victim['pid']))
fcntl.ioctl(a, 0x5452, struct.pack('i', 1))
b.send(b'x')
""",
    "signal by SIOCSPGRP": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8902, struct.pack('i', -victim['pid']))
fcntl.ioctl(a, 0x5452, struct.pack('i', 1))
b.send(b'x')
""",
    "open a pidfd": "os.pidfd_open(victim['pid'])",
    "limit it": "resource.prlimit(victim['pid'], resource.RLIMIT_CPU, (1, 1))",
    "read its limits": "resource.prlimit(victim['pid'], resource.RLIMIT_CPU)",
    "lower its priority": "os.setpriority(os.PRIO_PROCESS, victim['pid'], 19)",
    "change its scheduling": "os.sched_setscheduler(victim['pid'], os.SCHED_IDLE, os.sched_param(0))",
    "change its processors": "os.sched_setaffinity(victim['pid'], {min(os.sched_getaffinity(0))})",
    "change its disk priority": "call(251, 30, 1, victim['pid'], 3 << 13)",
    "trace it": "call(101, 117, 0x4206, victim['pid'], 0, 0)",
    "read its memory": "call(310, 270, victim['pid'], 0, 0, 0, 0, 0)",
    "write its memory": "call(311, 271, victim['pid'], 0, 0, 0, 0, 0)",
    "move its pages": "call(279, 239, victim['pid'], 0, 0, 0, 0, 0)",
    "compare with it": "call(312, 272, os.getpid(), victim['pid'], 1, 0, 0)",
    "read its environment": "open(f\"/proc/{victim['pid']}/environ\").read()",
    "open its memory": "open(f\"/proc/{victim['pid']}/mem\", 'rb')",
    "read its command line": "open(f\"/proc/{victim['pid']}/cmdline\").read()",
    "list processes": "assert str(victim['pid']) in os.listdir('/proc')",
    "raise its chance to be killed": "open(f\"/proc/{victim['pid']}/oom_score_adj\", 'w').write('1000')",
    "outlive the sandbox": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execv('/bin/sleep', ['sleep', victim['sleep']])
    os._exit(0)
""",
}

KERNEL = {
    "connect by TCP": "socket.create_connection(('127.0.0.1', victim['port']), 5)",
    "send by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', victim['port']))",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect(victim['socket'])",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + victim['socket'])",
    "send to a Unix socket from a pair": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', victim['datagrams'])
""",
    "ask the kernel by netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "pass a descriptor": """
a, b = socket.socketpair()
socket.send_fds(a, [b'x'], [0])
""",
    "io_uring": "call(425, 425, 1, ctypes.create_string_buffer(256))",
    "memory by memfd": "os.write(os.memfd_create('x'), b'x')",
    "memory that no limit counts once it is unmapped": "mmap.mmap(-1, 4096)",
    "the same by /dev/zero": "mmap.mmap(os.open('/dev/zero', os.O_RDONLY), 4096, prot=mmap.PROT_READ)",
    "shared memory": "call(31, 195, call(29, 194, 0, 4096, 0o1600), 0, 0)",
    "remove shared memory": "call(31, 195, victim['shared_memory'], 0, 0)",
    "attach shared memory": "call(30, 196, victim['shared_memory'], 0, 0)",
    "semaphores": "call(66, 191, call(64, 190, 0, 1, 0o1600), 0, 0, 0)",
    "a message queue": "call(71, 187, call(68, 186, 0, 0o1600), 0, 0)",
    "a POSIX message queue": """
name = victim['queue'].encode()
call(240, 180, name, os.O_CREAT | os.O_RDWR, 0o600, 0)
call(241, 181, name)
""",
    "a key": "call(248, 217, b'user', victim['queue'].encode(), b'x', 1, -3)",
    "a new user namespace": "call(272, 97, 0x10000000)",
    "a new user namespace by clone": """
if call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    os._exit(0)
""",
    "a new user namespace by clone3": """
if call(435, 435, ctypes.create_string_buffer(struct.pack('<8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)), 64) == 0:
    os._exit(0)
""",
    "userfaultfd": "call(323, 282, 1)",
    "performance counters": """
attributes = ctypes.create_string_buffer(struct.pack('<IIQQQQQ', 1, 112, 0, 0, 0, 0, 0x61) + bytes(64))
call(298, 241, attributes, 0, -1, -1, 0)
""",
    "be traced": "call(101, 117, 0, 0, 0, 0)",
    "a personality": "call(135, 92, 0x0040000)",
    "flush all disks": "call(306, 267, os.open('/usr', os.O_RDONLY))",
    "openat2": """
how = ctypes.create_string_buffer(struct.pack('<3Q', 0, 0, 0))
call(437, 437, -100, victim['file'].encode(), how, 24)
""",
}

if platform.machine() == "x86_64":
    KERNEL["a 32-bit system call"] = r"""
flags, prot = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
page = mmap.mmap(-1, 4096, flags=flags, prot=prot)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
if ctypes.CFUNCTYPE(ctypes.c_int)(address)() < 0:
    raise OSError("refused")
"""

ATTACKS = FILES | PROCESSES | KERNEL

KNOWN_WITHOUT_NAMESPACES = {"stat a file", "find out whether a file exists"}
"""The builtin confinement does not prevent these, and docs/rewards.md says so."""


@dataclass(frozen=True)
class Server:
    """The user that a server runs as, and an interpreter that this user can run."""

    user: int
    python: str

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        change = {"user": self.user, "group": self.user, "extra_groups": []} if self.user != os.geteuid() else {}
        return subprocess.Popen(list(words), cwd="/", **change, **options)

    def run(self, *words: str, stdin: bytes) -> tuple[str, str]:
        """Run a command. Returns what it printed to standard output and standard error."""
        path = os.pathsep.join(str(REPOSITORY / name) for name in (".", "rollout_server"))
        process = self.start(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        output, errors = process.communicate(stdin, TIMEOUT_S)
        return output.decode(), errors.decode()


def ordinary_python() -> str:
    """An interpreter outside folders that are closed to other users, such as /root."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(candidate)
        if path.exists() and all(parent.stat().st_mode & 1 for parent in path.resolve().parents):
            return candidate
    return ""
