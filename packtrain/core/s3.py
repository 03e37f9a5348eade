"""What only boto3 (the extra `s3`) can do with a bucket: take up a multipart upload again, object lock, versions.

Without the extra nothing here exists and large objects are streamed by obstore, from their beginning after each kill.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from packtrain.core.errors import StoreRefused, StoreUnreachable, UploadLost
from packtrain.core.platform import Platform
from packtrain.core.stores import DAMAGED_ON_THE_WAY, Plan, Store, StoreConfig, Upload, require_free, secret_of

if TYPE_CHECKING:
    from botocore.client import BaseClient
PUTS_MAX = 3
"""Of one part, where the store says that it did not arrive as it was sent, or does not answer."""
T = TypeVar("T")


def open_bucket(platform: Platform, config: StoreConfig, name: str, prefix: str) -> S3Bucket | None:
    """None where boto3 is not installed."""
    if find_spec("boto3") is None:
        return None
    import boto3
    from botocore.config import Config

    timeouts = Config(
        connect_timeout=config.deadline_s, read_timeout=config.deadline_s,
        retries={"total_max_attempts": 3, "mode": "standard"}, request_checksum_calculation="when_required",
        response_checksum_validation="when_required", s3={"addressing_style": "path" if config.endpoint else "auto"},
    )
    client = boto3.session.Session().client(
        "s3", endpoint_url=config.endpoint or None, region_name=config.region or None, config=timeouts,
        aws_access_key_id=secret_of(platform, config.key_id) or None,
        aws_secret_access_key=secret_of(platform, config.secret) or None,
    )
    return S3Bucket(client, name, prefix, config.url)


class S3Bucket:
    """A bucket through boto3. Raises StoreRefused and StoreUnreachable; of an upload also UploadLost."""

    def __init__(self, client: BaseClient, name: str, prefix: str, url: str) -> None:
        self._client, self._name, self._prefix, self._url = client, name, prefix, url

    def upload(self, store: Store, plan: Plan) -> Upload:
        """The upload that an earlier process left for that name, or a new one."""
        return _Parts(self, store, plan)

    def call(self, operation: str, name: str = "", **arguments: Any) -> dict[str, Any]:
        """One operation of the S3 API on the bucket, on the object `name` where one is given."""
        if name:
            arguments["Key"] = self.key(name)
        method: Callable[..., dict[str, Any]] = getattr(self._client, operation)
        return _explained(lambda: method(Bucket=self._name, **arguments), f"{self._url} {name}".rstrip())

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of an object whose answer says itself which ones they are."""
        answer = self.call("get_object", name, Range=f"bytes={offset}-{offset + size - 1}")
        data: bytes = _explained(answer["Body"].read, f"{self._url} {name}")
        told = answer.get("ContentRange", f"bytes 0-{len(data) - 1}/")
        if not told.startswith(f"bytes {offset}-{offset + len(data) - 1}/") or len(data) > size:
            raise StoreRefused(
                f"bytes {offset}..{offset + size} were asked for and {told!r} came", where=f"{self._url} {name}",
                fix="use a store that knows ranges",
            )
        return data

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def uploads_of(self, name: str) -> list[str]:
        """Ids of the unfinished uploads of that name, newest last."""
        try:
            found = self.call("list_multipart_uploads", Prefix=self.key(name)).get("Uploads", [])
        except (StoreRefused, UploadLost):  # some stores cannot tell; then the object is begun anew
            return []
        mine = [upload for upload in found if upload["Key"] == self.key(name)]
        return [upload["UploadId"] for upload in sorted(mine, key=lambda upload: str(upload.get("Initiated", "")))]

    def parts_of(self, name: str, upload: str) -> dict[int, tuple[int, str]]:
        """Part number -> (bytes, etag) of what has arrived."""
        parts: dict[int, tuple[int, str]] = {}
        marker = 0
        while True:
            page = self.call("list_parts", name, UploadId=upload, PartNumberMarker=marker)
            parts |= {part["PartNumber"]: (part["Size"], part["ETag"]) for part in page.get("Parts", [])}
            if not page.get("IsTruncated"):
                return parts
            marker = int(page["NextPartNumberMarker"])


class _Parts(Upload):
    """A multipart upload known by its id. The store checks each part's MD5 as it arrives."""

    in_order, shows = False, False

    def __init__(self, bucket: S3Bucket, store: Store, plan: Plan) -> None:
        self._bucket, self._store, self._plan = bucket, store, plan
        self._lock = threading.Lock()
        self._id, self._parts = self._earlier() or (self._begun(), {})

    def _earlier(self) -> tuple[str, dict[int, tuple[int, str]]] | None:
        """Id of the upload an earlier process left, if the store still has it, and what has arrived of it."""
        name = self._plan.name
        for upload in self._bucket.uploads_of(name)[-1:]:
            with suppress(UploadLost):
                return upload, self._bucket.parts_of(name, upload)
        return None

    def _begun(self) -> str:
        return str(self._bucket.call("create_multipart_upload", self._plan.name)["UploadId"])

    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        """By its size: what it holds is seen when the whole object is read back."""
        found = self._parts.get(index + 1)
        return found is not None and found[0] == self._plan.span(index)[1]

    def put(self, index: int, data: bytes) -> int:
        for trial in range(1, PUTS_MAX + 1):
            try:
                done = self._bucket.call(
                    "upload_part", self._plan.name, UploadId=self._id, PartNumber=index + 1, Body=data,
                    ContentMD5=md5_of(data),
                )
                break
            except StoreUnreachable:
                if trial == PUTS_MAX:
                    raise
        with self._lock:
            self._parts[index + 1] = (len(data), done["ETag"])
        return trial

    def finish(self, replace: bool) -> None:
        if not replace:
            require_free(self._store, self._plan.name)
        parts = [
            {"PartNumber": number, "ETag": self._parts[number][1]} for number in range(1, self._plan.chunks + 1)
        ]
        self._bucket.call(
            "complete_multipart_upload", self._plan.name, UploadId=self._id, MultipartUpload={"Parts": parts}
        )


def md5_of(data: bytes) -> str:
    """As the header Content-MD5 wants it: the store refuses what arrives with another."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _explained(call: Callable[[], T], where: str) -> T:
    """Its result, or what the client raises in our words."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code", "")
        if code == "NoSuchUpload":
            raise UploadLost(
                "the store no longer knows an upload that was under way", where=where,
                fix="see whether a rule of the bucket or somebody ends unfinished uploads early; try again",
            ) from error
        text = f"{code} ({status}): {error.response.get('Error', {}).get('Message', '')}"
        if 400 <= status < 500 and status not in (408, 429) and code not in DAMAGED_ON_THE_WAY:
            raise StoreRefused(
                f"the store refuses: {text}", where=where, fix="see credentials, rights, bucket, endpoint and region"
            ) from error
        raise _gone(text, where) from error
    except BotoCoreError as error:
        raise _gone(str(error), where) from error


def _gone(what: str, where: str) -> StoreUnreachable:
    return StoreUnreachable(what, where=where, fix="see that the store is up and the network lets through; try again")
