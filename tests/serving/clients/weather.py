"""Tools and a form of answers that the tests of clients share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

City = Literal["Rome", "Oslo"]
Days = Annotated[int, Field(ge=1, le=9)]
QUESTION = "How is the weather in Rome?"

ANSWERS = {
    QUESTION: "It is sunny in Rome.",
    "What is the weather in Oslo?": "It is rainy in Oslo.",
}
"""Questions that the trained model answers with the tool `get_weather`."""


class Place(BaseModel):
    """Arguments of `get_weather`."""

    city: City


class Weather(BaseModel):
    """Arguments of `weather`."""

    model_config = ConfigDict(extra="forbid")

    city: City
    days: Days


class Forecast(BaseModel):
    """A structured answer."""

    model_config = ConfigDict(extra="forbid")

    city: City
    sky: Literal["sunny", "rainy"]
    degrees: list[Annotated[int, Field(ge=-9, le=9)]] = Field(min_length=1, max_length=3)


def weather(city: City, days: Days) -> str:
    """Return the weather of the next days in a city."""
    return f"{days} days of rain in {city}"


def get_weather(city: City) -> str:
    """Return the weather in a city, in a form that the trained model knows."""
    return {"Rome": "sunny", "Oslo": "rainy"}[city]


def weather_tool() -> dict[str, Any]:
    """Return the tool as a body lists it."""
    function = {"name": "weather", "parameters": Weather.model_json_schema()}
    return {"type": "function", "function": function}
