"""From errno to a reason: what a failed system call on somebody's memory means to the caller."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

_REASONS: Final[Mapping[int, Reason]] = {
    errno.ENOENT: Reason.MEMORY_HANDLE_INVALID,
    errno.ESRCH: Reason.MEMORY_HANDLE_INVALID,
    errno.ENAMETOOLONG: Reason.MEMORY_HANDLE_INVALID,
    errno.EINVAL: Reason.MEMORY_HANDLE_INVALID,
    errno.EACCES: Reason.MEMORY_NOT_ALLOWED,
    errno.EPERM: Reason.MEMORY_NOT_ALLOWED,
    errno.EROFS: Reason.MEMORY_NOT_ALLOWED,
    errno.ELOOP: Reason.MEMORY_NOT_ALLOWED,
    errno.ENOTDIR: Reason.MEMORY_NOT_ALLOWED,
    errno.ETXTBSY: Reason.MEMORY_NOT_ALLOWED,
    errno.ENXIO: Reason.MEMORY_NOT_ALLOWED,
    errno.ENODEV: Reason.UNSUPPORTED,
    errno.EOPNOTSUPP: Reason.UNSUPPORTED,
    errno.ENOMEM: Reason.MEMORY_LIMIT,
    errno.EAGAIN: Reason.MEMORY_LIMIT,
    errno.ENOSPC: Reason.MEMORY_LIMIT,
    errno.EDQUOT: Reason.MEMORY_LIMIT,
    errno.EFBIG: Reason.MEMORY_LIMIT,
    errno.EOVERFLOW: Reason.MEMORY_LIMIT,
    errno.EMFILE: Reason.LIMIT_EXCEEDED,
    errno.ENFILE: Reason.LIMIT_EXCEEDED,
}


def from_os_error(error: OSError, action: str, *, field: str, **metadata: object) -> KvxferError:
    """The :class:`KvxferError` for a failed system call.

    :param action: what failed, as the start of a sentence (``"opening '/x'"``).
    :param field: the field of the handle that named the object.
    """
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    reason = _REASONS.get(number, Reason.INTERNAL)
    return KvxferError(
        reason,
        f"{action} failed: {error.strerror} ({name})",
        field=field,
        errno=name,
        action=action,
        **metadata,
    )
