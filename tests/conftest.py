"""What all tests share."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("pipeloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipeloom")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it runs in the background
