"""Tables as CSV, Parquet and JSON files."""

from pathlib import Path

import pandas as pd

from keyedopt.reports.tables import TEXT, Tables

#: First characters with which a spreadsheet takes a text for a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv(tables: Tables, folder: Path) -> None:
    """Write a CSV file for each table; texts that look like formulas get a leading quote."""
    for name, frame in tables.by_name().items():
        _harmless(frame).to_csv(folder / f"{name}.csv", index=False, encoding="utf-8")


def _harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose texts are not formulas. Columns without formulas are not copied."""
    found = {}
    for column in frame.columns:
        if str(frame[column].dtype) == TEXT:
            formulas = frame[column].str.startswith(FORMULA).fillna(False).astype(bool)
            if formulas.any():
                found[column] = frame[column].where(~formulas, "'" + frame[column])
    return frame.assign(**found)


def parquet(tables: Tables, folder: Path) -> None:
    """Write a Parquet file for each table."""
    for name, frame in tables.by_name().items():
        frame.to_parquet(folder / f"{name}.parquet", index=False)


def json(tables: Tables, folder: Path) -> None:
    """Write a JSON file for each table: a list of rows, in which missing and non-finite values are null."""
    for name, frame in tables.by_name().items():
        frame.to_json(
            folder / f"{name}.json", orient="records", date_format="iso", force_ascii=False, indent=1
        )
