"""Certificates that tests make for themselves, by openssl: no key is in the repository."""

import os
import pathlib
import subprocess


def _openssl(*args, **options):
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr


class Authority:
    """Signs; its own certificate and all that it signed lie in `folder`."""

    def __init__(self, folder, name="ca"):
        self.folder = pathlib.Path(folder)
        self.ca = self.folder / f"{name}.pem"
        self.key = self.folder / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 60,
                 "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.ca)

    def clients(self, name=None):
        """What tritonclient wants of TLS, with `name`'s certificate if a client shows one."""
        own = str(self.folder / f"{name}.pem") if name else None
        return {"ssl": True, "root_certificates": str(self.ca), "private_key": own, "certificate_chain": own}

    def sign(self, name, *names, days=1):
        """`folder/name.pem`, key and certificate: one file, so that what replaces it is whole at any moment."""
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
