"""Certificates that tests make with openssl, so that no key is in the repository."""

import os
import pathlib
import subprocess


def _openssl(*args, **options):
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr


class Authority:
    """A certificate authority. Its own certificate and all certificates that it signs are in `folder`."""

    def __init__(self, folder, name="ca"):
        self.folder = pathlib.Path(folder)
        self.ca = self.folder / f"{name}.pem"
        self.key = self.folder / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 60,
                 "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.ca)

    def clients(self, name=None):
        """The TLS options of tritonclient, with `name`'s certificate if the client shows one."""
        own = str(self.folder / f"{name}.pem") if name else None
        return {"ssl": True, "root_certificates": str(self.ca), "private_key": own, "certificate_chain": own}

    def sign(self, name, *names, days=1):
        """Writes `folder/name.pem`, which has a key and its certificate. Both are in one file, so that a
        replacement is atomic."""
        work = self.folder / f"{name}.part"
        work.mkdir()
        (work / "names").write_text("subjectAltName=" + ",".join(names))
        _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                 f"/CN={name}", "-keyout", work / "key", "-out", work / "request")
        _openssl("x509", "-req", "-in", work / "request", "-days", days, "-CA", self.ca, "-CAkey", self.key,
                 "-extfile", work / "names", "-out", work / "certificate")
        (work / "both").write_text((work / "key").read_text() + (work / "certificate").read_text())
        (work / "both").chmod(0o600)
        made = self.folder / f"{name}.pem"
        os.replace(work / "both", made)
        for each in work.iterdir():
            each.unlink()
        work.rmdir()
        return made
