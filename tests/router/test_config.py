"""Settings of the router that contradict each other or themselves."""

import pytest
from headrace_proto.settings import SettingsError
from headrace_router.config import RouterConfig


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(SettingsError, match="--api-key: must not be empty"):
        RouterConfig(tokenizer_name="folder", api_key="")
